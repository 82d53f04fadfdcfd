"""The exact expected reward: a frozen model's answer to every configuration can be known, so nothing need be sampled.

    E[reward] = sum over configurations of p(tier) p(position | tier) p(top-k | ...) p(blocks | ...) x reward

It is differentiable: its gradient is what the estimates of GRPO scatter around, and training on it is the upper
reference for what sampling a few members of a group can reach.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from groupwise.core.config import RewardConfig
from groupwise.core.reward import weigh
from groupwise.core.types import Terms
from groupwise.workloads.controller.conditions import Conditions
from groupwise.workloads.controller.workload import ControllerWorkload

Tables = Float[Tensor, "rows tiers positions top_ks blocks"]


def expected_reward(
    workload: ControllerWorkload,
    conditions: Conditions,
    rows: Int64[Tensor, " rows"],
    weights: Mapping[str, float] | None = None,
) -> Float[Tensor, " rows"]:
    """The mean reward of the present policy on each condition, with gradient."""
    rewards = all_rewards(workload, conditions, rows, weights)
    chances = workload.controller.path_logp(conditions, rows).exp()
    return (chances * rewards.to(chances)).flatten(1).sum(1)


def best_reward(
    workload: ControllerWorkload,
    conditions: Conditions,
    rows: Int64[Tensor, " rows"],
    weights: Mapping[str, float] | None = None,
) -> Float[Tensor, " rows"]:
    """The most that any allowed configuration earns on each condition; it includes luck that nobody can foresee."""
    rewards = all_rewards(workload, conditions, rows, weights)
    return rewards.masked_fill(~conditions.fits(rows), -torch.inf).flatten(1).amax(1)


@torch.no_grad()
def all_rewards(
    workload: ControllerWorkload,
    conditions: Conditions,
    rows: Int64[Tensor, " rows"],
    weights: Mapping[str, float] | None = None,
) -> Tables:
    """What every configuration earns on each condition."""
    medians, _ = conditions.estimates(rows)
    accuracy = torch.stack([_accuracies(workload, conditions, row) for row in rows.tolist()])
    ratio = medians / conditions.budget_ms[rows].view(-1, 1, 1, 1, 1)
    terms = {"accuracy": accuracy, **workload.terms_of(ratio, workload.cost.expand_as(ratio))}
    flat = Terms({name: values.flatten() for name, values in terms.items()})
    return weigh(flat, RewardConfig(weights=weights or {})).total.view_as(ratio)


def _accuracies(workload: ControllerWorkload, conditions: Conditions, row: int) -> Tensor:
    """How right the model is under every configuration; all of one question in one batch."""
    shape = workload.cost.shape
    choices = torch.cartesian_prod(*(torch.arange(size) for size in shape))
    questions = conditions.question_of(torch.tensor([row])) * len(choices)
    said = workload.answer(questions, choices)
    return workload.judge_accuracy(questions, said).values["accuracy"].view(shape)
