"""Commands that measure: learning, speed, gradients. Each writes its results beside its name."""
