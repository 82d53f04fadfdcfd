"""From noise to latents: schedules, steppers, the denoiser."""
