"""``python -m benchmarks.throughput``: ``jaxpg bench``, with its results beside the others."""

import sys

from benchmarks import RESULTS
from jaxpg.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "--output", str(RESULTS / "throughput"), *sys.argv[1:]]))
