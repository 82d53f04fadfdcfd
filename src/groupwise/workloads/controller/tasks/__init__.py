"""Controller tasks."""
