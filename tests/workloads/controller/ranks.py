"""Runs under torchrun: two steps of the small controller, members of a group apart; rank 0 writes what came out.

torchrun ... ranks.py OUTPUT.pt
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from tiny.controller import recipe

from groupwise.core.placement import place
from groupwise.dist.comm import connect, disconnect, exit_now
from groupwise.training.loop import training_steps
from groupwise.training.rollout import generate_rollouts
from groupwise.training.run import set_up


def outcome(placement: str) -> dict[str, object]:
    """The choices of the first step by (group, member), the first gradient, and the weights after two steps."""
    config = replace(recipe(), steps=2, placement=placement, rows_per_pass=16)
    setup = set_up(config)
    placed = place(setup.shape, seed=config.seed, step=0)
    rows = placed.rows_of(setup.comm.rank)
    rollouts = generate_rollouts(setup, placed)
    order = setup.comm.gather(rows.group * config.group_size + rows.member).argsort()
    choices = setup.comm.gather(rollouts.data["choices"])[order]
    steps, parameters = training_steps(setup), list(setup.workload.policy.parameters())
    next(steps)
    gradient = torch.cat([parameter.grad.flatten() for parameter in parameters])
    next(steps)
    weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
    return {"choices": choices, "gradient": gradient, "weights": weights, "ranks": setup.comm.ranks}


if __name__ == "__main__":
    found = outcome("spread")
    if connect().is_main:
        torch.save(found, sys.argv[1])
    disconnect()
    exit_now()
