"""Embedded example: questions about mosaics of handwritten digits."""
