"""Training: the loop, a round, the update, checkpoints, the run."""
