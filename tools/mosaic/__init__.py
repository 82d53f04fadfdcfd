"""Rebuild the embedded mosaic model: `python -m tools.mosaic --help`."""
