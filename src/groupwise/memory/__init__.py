"""Memory: plan, trace, measurement, recovery."""
