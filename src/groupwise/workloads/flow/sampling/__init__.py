"""Sampling of latents: noise schedule, steppers, denoiser, cache of encoded conditions."""
