"""The functional core of policy-gradient reinforcement learning in JAX."""
