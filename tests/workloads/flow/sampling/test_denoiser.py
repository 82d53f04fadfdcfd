"""Deterministic steps before and after the window."""

import torch
from torch.testing import assert_close

from groupwise.workloads.flow.sampling.denoiser import Denoiser
from groupwise.workloads.flow.sampling.schedule import SamplingConfig, WindowConfig, noise_levels


def visited(tail_steps, window):
    """The noise levels at which a velocity of 1 is asked for after the window, and where the latents end."""
    config = SamplingConfig(num_inference_steps=8, window=WindowConfig("all"), tail_steps=tail_steps)
    denoiser = Denoiser(config, noise_levels(config), (1,), torch.device("cpu"), window)
    asked = []

    def velocity(latents, sigma):
        asked.append(sigma.item())
        return torch.ones_like(latents)

    return asked, denoiser.denoise_from_window(torch.zeros(1, 1), velocity).item()


def test_after_the_window_all_steps_are_taken_or_as_many_as_asked_for():
    # after steps 0 and 1 of eight the noise level is .75, and a velocity of 1 leads from 0 to -.75 in any steps
    assert visited(None, range(2)) == ([0.75, 0.625, 0.5, 0.375, 0.25, 0.125], -0.75)
    assert visited(3, range(2)) == ([0.75, 0.5, 0.25], -0.75)
    assert visited(1, range(2)) == ([0.75], -0.75)
    assert visited(9, range(2)) == visited(None, range(2))
    assert visited(2, range(6, 7)) == ([0.125], -0.125)


def test_two_steps_of_a_curved_path_by_hand():
    """dx / dsigma = x: in n steps of equal length from sigma s, (1 - s / n)^n of x is left."""
    config = SamplingConfig(num_inference_steps=8, window=WindowConfig("all"), tail_steps=2)
    denoiser = Denoiser(config, noise_levels(config), (1,), torch.device("cpu"), range(4))
    left = denoiser.denoise_from_window(torch.ones(1, 1), lambda latents, sigma: latents)
    assert_close(left, torch.tensor([[0.75**2]]))
