"""Clocks, latency records, estimator."""
