"""Runs under torchrun: one step of the tiny chat task, members of a group apart; rank 0 writes what came out.

torchrun ... ranks.py FOLDER OUTPUT.pt
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from groupwise.core.placement import place
from groupwise.dist.comm import connect, disconnect, exit_now
from groupwise.training.loop import training_steps
from groupwise.training.rollout import generate_rollouts
from groupwise.training.run import set_up
from workloads.chat.tiny import recipe

FIGURES = ("tokens", "tokens_better", "tokens_worse", "truncated_share", "entropy_sampled", "reward")


def outcome(
    folder: Path, placement: str, *, rows_per_pass: int, tokens_per_pass: int | None = None
) -> dict[str, object]:
    """What was said by (group, member), the gradient and the step's metrics.

    Weights would say less: AdamW makes whole steps of the rounding in gradients that are zero.
    """
    config = recipe(folder, tokens_per_pass=tokens_per_pass)
    config = replace(config, steps=1, placement=placement, rows_per_pass=rows_per_pass)
    setup = set_up(config)
    placed = place(setup.shape, seed=config.seed, step=0)
    rows = placed.rows_of(setup.comm.rank)
    said = [completion.ids for completion in generate_rollouts(setup, placed).data["completion"]]
    keys = zip(rows.group.tolist(), rows.member.tolist(), said, strict=True)
    everything = {(group, member): ids for group, member, ids in setup.comm.gather_objects(list(keys))}
    steps = list(training_steps(setup))
    gradient = torch.cat([parameter.grad.flatten() for parameter in setup.workload.policy.parameters()])
    metrics = {name: steps[-1].metrics[name] for name in FIGURES}
    return {"said": everything, "gradient": gradient, "metrics": metrics, "ranks": setup.comm.ranks}


if __name__ == "__main__":
    found = outcome(Path(sys.argv[1]), "spread", rows_per_pass=4)
    if connect().is_main:
        torch.save(found, sys.argv[2])
    disconnect()
    exit_now()
