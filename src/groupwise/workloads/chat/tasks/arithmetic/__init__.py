"""Embedded example: sums worked out step by step."""
