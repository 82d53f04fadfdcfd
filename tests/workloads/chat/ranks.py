"""Runs under torchrun: one step of the tiny chat task, members of a group on several ranks; rank 0 writes the result.

torchrun ... ranks.py FOLDER OUTPUT.pt
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from tiny.chat import recipe

from groupwise.core.placement import place
from groupwise.dist.comm import connect, disconnect, exit_now
from groupwise.training.loop import generate_rollouts, training_steps
from groupwise.training.run import set_up

METRICS = (
    "completion_tokens",
    "completion_tokens_positive_advantage",
    "completion_tokens_negative_advantage",
    "truncated_fraction",
    "rollout_entropy",
    "reward",
)


def outcome(
    folder: Path, placement: str, *, rows_per_pass: int, tokens_per_pass: int | None = None
) -> dict[str, object]:
    """Completions by (group, member), the gradient and the step's metrics.

    Weights would prove less: AdamW turns rounding errors in zero gradients into full steps.
    """
    config = recipe(folder, tokens_per_pass=tokens_per_pass)
    config = replace(config, steps=1, placement=placement, rows_per_pass=rows_per_pass)
    setup = set_up(config)
    placed = place(setup.shape, seed=config.seed, step=0)
    rows = placed.rows_of(setup.comm.rank)
    rollouts = generate_rollouts(setup.workload, placed, setup.comm)
    ids = [completion.ids for completion in rollouts.data["completion"]]
    keyed = zip(rows.group.tolist(), rows.member.tolist(), ids, strict=True)
    completions = {(group, member): ids for group, member, ids in setup.comm.gather_objects(list(keyed))}
    steps = list(training_steps(setup.workload, state=setup.state, shape=setup.shape, config=config, comm=setup.comm))
    gradient = torch.cat([parameter.grad.flatten() for parameter in setup.workload.policy.parameters()])
    metrics = {name: steps[-1].metrics[name] for name in METRICS}
    return {"completions": completions, "gradient": gradient, "metrics": metrics, "ranks": setup.comm.ranks}


if __name__ == "__main__":
    result = outcome(Path(sys.argv[1]), "spread", rows_per_pass=4)
    if connect().is_main:
        torch.save(result, sys.argv[2])
    disconnect()
    exit_now()
