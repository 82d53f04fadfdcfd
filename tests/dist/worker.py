"""Runs under torchrun: the same steps for every placement and loss; rank 0 writes the outcomes.

torchrun ... worker.py OUTPUT.pt
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from fakes import TinyConfig, recipe

import groupwise as gw
from groupwise.core.placement import place
from groupwise.dist.comm import connect, disconnect, exit_now
from groupwise.training.evaluate import held_out_metrics
from groupwise.training.loop import training_steps
from groupwise.training.rollout import generate_rollouts
from groupwise.training.run import set_up

LOSSES = {"clipped": gw.LossConfig(kl=0.05, entropy=0.01), "ranking": gw.LossConfig(kind="ranking")}


def outcome(config: gw.Config) -> dict[str, object]:
    """Rollouts of the first step by (group, member), the first gradient, weights and evaluation after three steps."""
    setup = set_up(config)
    placement = place(setup.shape, seed=config.seed, step=0)
    rows = placement.rows_of(setup.comm.rank)
    rollouts = generate_rollouts(setup, placement)
    order = setup.comm.gather(rows.group * config.group_size + rows.member).argsort()
    choices = setup.comm.gather(rollouts.data["choices"])[order]
    steps = training_steps(setup)
    first = next(steps)
    parameters = list(setup.workload.policy.parameters())
    gradient = torch.cat([parameter.grad.flatten() for parameter in parameters])
    rewards = [first.metrics["reward"], *(step.metrics["reward"] for step in steps)]
    weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
    return {
        "choices": choices,
        "gradient": gradient,
        "weights": weights,
        "rewards": rewards,
        "samples": first.samples,
        "all_weights": setup.comm.gather(weights[None]),
        "held_out": held_out_metrics(setup),
        "evaluated": setup.comm.gather_objects([setup.workload.evaluated]),
    }


def configs() -> dict[str, gw.Config]:
    base = replace(recipe(), steps=3, conditions_per_step=8, group_size=8, rows_per_pass=2)
    configs = {
        f"{placement} {name}": replace(base, placement=placement, loss=loss)
        for placement in ("whole", "spread", "shuffled")
        for name, loss in LOSSES.items()
    }
    # 'whole' gives rank 0 the step's first conditions; with all but two flat, most ranks have no row to train
    configs["idle ranks"] = replace(base, workload=TinyConfig(flat_below=34))
    return configs


if __name__ == "__main__":
    outcomes = {name: outcome(config) for name, config in configs().items()}
    comm = connect()
    if comm.is_main:
        torch.save(outcomes, sys.argv[1])
    disconnect()
    exit_now()
