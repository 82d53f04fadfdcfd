"""Runs under torchrun: flow-recam's step on as many ranks as there are, for every placement; rank 0 saves the result.

torchrun ... ranks.py OUTPUT.pt
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from groupwise.core.advantage import compute_advantages
from groupwise.core.placement import place
from groupwise.core.reward import weigh
from groupwise.dist.comm import connect, disconnect, exit_now
from groupwise.recipes.flow_recam import recipe as recam
from groupwise.training.loop import compute_rewards, gather_group_ids, generate_rollouts, training_steps
from groupwise.training.run import set_up
from workloads.flow.small import SmallConfig

PLACEMENTS = ("whole", "spread", "shuffled")


def outcome(placement: str) -> dict[str, object]:
    """The first step's groups, rewards and advantages as each rank sees them, and the weights after two steps.

    The numbers are those of `flow-recam`: 8 conditions a step, groups of 4, 2 rows a pass. The model is tiny.
    """
    real = recam()
    config = replace(
        real,
        workload=SmallConfig(reference=True),
        reward=replace(real.reward, weights={}),
        placement=placement,
        steps=2,
    )
    setup = set_up(config)
    comm, placed = setup.comm, place(setup.shape, seed=config.seed, step=0)
    rollouts = generate_rollouts(setup.workload, placed, comm)
    ids = gather_group_ids(rollouts, placed, comm)
    rewards = weigh(compute_rewards(setup.workload, rollouts, comm), config.reward)
    advantages = compute_advantages(rewards, ids, config.advantage)
    order = (placed.group * config.group_size + placed.member).argsort()
    latents = comm.gather(rollouts.data["latents"].flatten(1))
    for _ in training_steps(setup.workload, state=setup.state, shape=setup.shape, config=config, comm=comm):
        pass
    weights = torch.cat([parameter.detach().flatten() for parameter in setup.workload.policy.parameters()])
    return {
        "shape": (setup.shape.rollouts_per_step, setup.shape.passes, setup.shape.ranks),
        "ids": ids[order],
        "latents": latents[order],
        "rewards": rewards.total[order],
        "advantages": advantages.values[order],
        "everyone": comm.gather(advantages.values[order][None]),
        "weights": weights,
        "all weights": comm.gather(weights[None]),
    }


if __name__ == "__main__":
    outcomes = {placement: outcome(placement) for placement in PLACEMENTS}
    if connect().is_main:
        torch.save(outcomes, sys.argv[1])
    disconnect()
    exit_now()
