"""Embedded example: three sprites on a chequered floor, filmed by a camera that must follow a path."""
