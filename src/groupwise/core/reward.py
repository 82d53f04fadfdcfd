"""Weigh named reward terms. A failed term is missing (NaN), never zero."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.core.config import RewardConfig
from groupwise.core.errors import UserError
from groupwise.core.types import RewardTerms


@dataclass(frozen=True)
class Rewards:
    """What each rollout earned, and how it came about."""

    total: Float[Tensor, " rollouts"]
    """NaN where a term that carries weight is missing: a sum without it could not be compared with its siblings'."""
    terms: RewardTerms
    missing: int
    per_decision: Float[Tensor, "rollouts decisions"] | None = None
    """What each decision earned on top of its rollout's total; None where decisions have no rewards of their own."""


def weigh(terms: RewardTerms, config: RewardConfig) -> Rewards:
    """The weighted sum of a step's terms; refused when too many rollouts have none."""
    _check_names(terms, config)
    rows = len(next(iter(terms.per_rollout.values())))
    total = torch.zeros(rows, dtype=torch.float64)
    for name, values in terms.per_rollout.items():
        weight = config.weights.get(name, 1.0)
        if weight:
            total = total + weight * values.cpu().double()
    total = total.masked_fill(~total.isfinite(), torch.nan)
    per_decision = _weigh_decisions(terms, config)
    without = total.isnan() if per_decision is None else total.isnan() | per_decision.isnan().all(1)
    missing = int(without.sum())
    if missing > config.max_missing_share * rows:
        raise UserError(_too_many_missing(terms, missing, rows, config))
    return Rewards(total, terms, missing, per_decision)


def _weigh_decisions(terms: RewardTerms, config: RewardConfig) -> Float[Tensor, "rollouts decisions"] | None:
    weights = {name: config.weights.get(name, 1.0) for name in terms.per_decision}
    counted = [weight * terms.per_decision[name].cpu().double() for name, weight in weights.items() if weight]
    if not counted:
        return None
    total = torch.stack(counted).sum(0)
    return total.masked_fill(~total.isfinite(), torch.nan)


def term_statistics(terms: RewardTerms) -> dict[str, float]:
    """Mean, std and missing share of each term, over the rows that have it."""
    statistics = {}
    for name, values in {
        **terms.per_rollout,
        **{name: each.flatten() for name, each in terms.per_decision.items()},
    }.items():
        present = values[~values.isnan()].double()
        statistics[f"reward/{name}"] = present.mean().item() if len(present) else float("nan")
        statistics[f"reward/{name}/std"] = present.std(correction=0).item() if len(present) else float("nan")
        statistics[f"reward/{name}/missing_share"] = 1 - len(present) / max(len(values), 1)
    return statistics


def _check_names(terms: RewardTerms, config: RewardConfig) -> None:
    if not terms.per_rollout:
        raise UserError("The workload gives no reward term: rewards() must return at least one named term.")
    both = sorted(set(terms.per_rollout) & set(terms.per_decision))
    if both:
        raise UserError(f"'{both[0]}' names a reward of rollouts and one of decisions: give them different names.")
    unknown = sorted(set(config.weights) - set(terms.per_rollout) - set(terms.per_decision))
    if unknown:
        raise UserError(
            f"reward.weights names '{unknown[0]}', which is not a reward of this workload. It has:"
            f" {', '.join([*terms.per_rollout, *terms.per_decision])}."
        )


def _too_many_missing(terms: RewardTerms, missing: int, rows: int, config: RewardConfig) -> str:
    why = "; ".join(f"{name}: {reason}" for name, reason in terms.failures.items())
    return (
        f"{missing} of {rows} rollouts of this step have no reward, more than reward.max_missing_share"
        f" {config.max_missing_share:g} allows{f' ({why})' if why else ''}. A missing reward is never counted as zero."
        " Mend the reward function, or raise reward.max_missing_share if so many failures are expected."
    )
