"""Flow tasks."""
