"""One file a library: builds PPO on CartPole from a specification and answers a parent's lines."""
