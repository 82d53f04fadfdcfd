"""The memory planner: integers in, integers out, in milliseconds and without torch (`trace` apart)."""
