"""Clocks, latency records and the latency estimator."""
