"""``python -m jaxpg`` is the command ``jaxpg``."""

import sys

from jaxpg.cli import main

if __name__ == "__main__":
    sys.exit(main())
