"""How often the host waits for the device in a training step of each recipe."""

import pytest

from accelerator.steps import small_recipe
from groupwise.training.loop import train_step
from groupwise.training.setup import set_up

AT_MOST = {"doors": 25, "flow": 16, "controller": 60}
"""Waits in a step. In each: three ends of stages, a check of the rollouts, a mask, two numbers of the update.

Besides, doors: eight passes, rewards and samples. Flow: two passes, and decoding latents in four. Controller: four
decisions in each of two passes, and the prefixes of new questions with one wait per block.
"""


@pytest.mark.parametrize(
    "name", ["doors", *(pytest.param(n, marks=pytest.mark.device) for n in ("flow", "controller"))]
)
def test_a_step_waits_a_few_times(device, counters, name):
    setup = set_up(small_recipe(name, device=device.type))
    train_step(setup)
    counters.reset_counters()
    metrics = train_step(setup).metrics
    assert counters.counters()["host_syncs"] <= AT_MOST[name]
    assert metrics["host_syncs"] <= counters.counters()["host_syncs"]
