"""Embedded example: a still image that must obey a prompt, "two red discs left", with an independent judge."""
