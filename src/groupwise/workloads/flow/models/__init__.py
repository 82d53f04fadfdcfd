"""Thin adapters over diffusers: what a velocity is asked with, and where weights, text encoders and VAEs come from."""
