"""A run on the disk: its folder, its checkpoints, and what an abrupt end leaves."""
