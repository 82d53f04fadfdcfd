"""Measurements of a running process."""
