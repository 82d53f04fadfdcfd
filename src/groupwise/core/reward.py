"""Weighted sum of named reward terms, and statistics per term. A failed term is missing (NaN), never zero."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from groupwise.core.config import RewardConfig
from groupwise.core.errors import UserError
from groupwise.core.types import RewardTerms


@dataclass(frozen=True)
class Rewards:
    """The reward of each rollout, and the terms it is made of."""

    total: Float[Tensor, " rollouts"]
    """NaN where a term with weight is missing: a sum without it could not be compared within the group."""
    terms: RewardTerms
    per_decision: Float[Tensor, "rollouts decisions"] | None = None
    """The reward of each decision on top of its rollout's total; None where decisions have no rewards of their own."""

    @property
    def missing(self) -> int:
        return int(self.is_missing.sum())

    @property
    def is_missing(self) -> Bool[Tensor, " rollouts"]:
        """Rollouts without a reward."""
        return (
            self.total.isnan() if self.per_decision is None else self.total.isnan() | self.per_decision.isnan().all(1)
        )


def weigh(terms: RewardTerms, config: RewardConfig) -> Rewards:
    """The weighted sum of a step's terms; an error where too many rollouts have none."""
    rewards = weigh_present(terms, config)
    problem = too_many_missing(rewards, config)
    if problem:
        raise UserError(problem)
    return rewards


def weigh_present(terms: RewardTerms, config: RewardConfig) -> Rewards:
    """The weighted sum of a step's terms, however many are missing."""
    _check_names(terms, config)
    rows = len(next(iter(terms.per_rollout.values())))
    total = torch.zeros(rows, dtype=torch.float64)
    for name, values in terms.per_rollout.items():
        weight = config.weights.get(name, 1.0)
        if weight:
            total = total + weight * values.cpu().double()
    total = total.masked_fill(~total.isfinite(), torch.nan)
    per_decision = _weigh_decisions(terms, config)
    return Rewards(total, terms, per_decision)


def _weigh_decisions(terms: RewardTerms, config: RewardConfig) -> Float[Tensor, "rollouts decisions"] | None:
    weights = {name: config.weights.get(name, 1.0) for name in terms.per_decision}
    weighted = [weight * terms.per_decision[name].cpu().double() for name, weight in weights.items() if weight]
    if not weighted:
        return None
    total = torch.stack(weighted).sum(0)
    return total.masked_fill(~total.isfinite(), torch.nan)


def term_statistics(terms: RewardTerms) -> dict[str, float]:
    """Mean and std of each term over the rows that have it, and the share of rows that do not."""
    statistics = {}
    per_decision = {name: table.flatten() for name, table in terms.per_decision.items()}
    for name, values in {**terms.per_rollout, **per_decision}.items():
        present = values[~values.isnan()].double()
        statistics[f"reward/{name}"] = present.mean().item() if len(present) else float("nan")
        statistics[f"reward/{name}/std"] = present.std(correction=0).item() if len(present) else float("nan")
        statistics[f"reward/{name}/missing_fraction"] = 1 - len(present) / max(len(values), 1)
    return statistics


def _check_names(terms: RewardTerms, config: RewardConfig) -> None:
    if not terms.per_rollout:
        raise UserError("The workload has no reward term: rewards() must return at least one named term.")
    both = sorted(set(terms.per_rollout) & set(terms.per_decision))
    if both:
        raise UserError(f"'{both[0]}' names a reward of rollouts and one of decisions: give them different names.")
    unknown = sorted(set(config.weights) - set(terms.per_rollout) - set(terms.per_decision))
    if unknown:
        raise UserError(
            f"reward.weights names '{unknown[0]}', which is not a reward of this workload. It has:"
            f" {', '.join([*terms.per_rollout, *terms.per_decision])}."
        )


def too_many_missing(rewards: Rewards, config: RewardConfig) -> str | None:
    """Why a step cannot be trained; None where enough of its rollouts have a reward."""
    missing, rows, allowed = rewards.missing, len(rewards.total), config.max_missing_fraction
    if missing <= allowed * rows:
        return None
    reasons = "; ".join(f"{name}: {reason}" for name, reason in rewards.terms.failures.items())
    return (
        f"{missing} of {rows} rollouts of this step have no reward, more than reward.max_missing_fraction {allowed:g}"
        f" allows{f' ({reasons})' if reasons else ''}. A missing reward is never counted as zero. Fix the reward"
        " function, or raise reward.max_missing_fraction if so many failures are expected."
    )
