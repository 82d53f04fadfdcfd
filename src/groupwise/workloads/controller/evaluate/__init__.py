"""Evaluation of a controller against baselines."""
