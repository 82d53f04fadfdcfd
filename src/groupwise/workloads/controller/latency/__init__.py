"""Estimated and measured latency of knob settings."""
