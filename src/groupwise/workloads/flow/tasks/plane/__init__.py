"""Embedded example: a camera moves over a textured plane."""
