"""The controller network and its decisions."""
