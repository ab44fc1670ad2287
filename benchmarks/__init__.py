"""Commands that measure: learning, speed, gradients. Each writes its results beside its name."""

from pathlib import Path

RESULTS = Path(__file__).parent / "results"
