"""Flow models on top of diffusers: Wan with camera layers, Stable Diffusion 3, and what of them is trained."""
