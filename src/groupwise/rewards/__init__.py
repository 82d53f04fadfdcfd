"""One reward layer for all workloads."""
