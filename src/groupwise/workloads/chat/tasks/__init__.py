"""Chat tasks."""
