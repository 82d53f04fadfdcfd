"""Losses as pure functions with explicit denominators.

Each returns a sum over the given rows that is already divided, so the losses of all passes on all ranks add up to the
loss of the step, and the number of passes cannot change its gradient.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.functional import logsigmoid

from groupwise.core.groups import Groups

PerDecision = Float[Tensor, "rows decisions"]
Mask = Bool[Tensor, "rows decisions"]
PerRow = Float[Tensor, " rows"]
AdvantageLike = PerRow | PerDecision
"""The weight of each row's log-probability in the loss, or of each of its decisions."""
Denominator = float | PerRow


def denominators(mask: Mask, kind: str, *, decisions: int, rollouts: int, constant: float) -> PerRow:
    """What each row's sum over decisions is divided by, given the totals of the whole step.

    decisions  all decisions of the step                   Yu et al., DAPO, arXiv 2503.14476
    rollouts   the row's own decisions x rollouts          Shao et al., GRPO, arXiv 2402.03300
    constant   a constant                                  Liu et al., Dr. GRPO, arXiv 2503.20783
    """
    dtype = torch.float64 if mask.device.type == "cpu" else torch.float32  # not all devices have float64
    if kind == "rollouts":
        return (mask.sum(1).clamp(min=1) * rollouts).to(dtype)
    total = float(decisions if kind == "decisions" else constant)
    return torch.full((len(mask),), total, dtype=dtype, device=mask.device)


def clipped_surrogate(
    logp: PerDecision,
    old_logp: PerDecision,
    advantages: AdvantageLike,
    mask: Mask,
    *,
    denominator: Denominator,
    clip: tuple[float, float] = (0.2, 0.2),
    per_rollout: bool = False,
) -> Float[Tensor, ""]:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A), where ratio = exp(logp - old_logp) and clip = (low, high).

    Per rollout the ratio is the geometric mean over its decisions (GSPO: Zheng et al., arXiv 2507.18071).
    """
    ratio = importance_ratio(logp, old_logp, mask, per_rollout=per_rollout)
    gain = per_decision(advantages).to(logp)
    low, high = clip
    surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - low, 1 + high) * gain)
    return -masked_sum(surrogate, mask, denominator)


def importance_ratio(logp: PerDecision, old_logp: PerDecision, mask: Mask, *, per_rollout: bool = False) -> PerDecision:
    """Probability now / probability when sampled, of each decision (or rollout); 1 where masked."""
    change = torch.where(mask, logp - old_logp, torch.zeros_like(logp))
    if per_rollout:
        change = (change.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).expand_as(logp)
    return change.exp()


def per_decision(advantages: AdvantageLike) -> Tensor:
    """In a shape that broadcasts to [rows, decisions]."""
    return advantages if advantages.ndim == 2 else advantages[:, None]


def policy_gradient(
    logp: PerDecision, advantages: AdvantageLike, mask: Mask, *, denominator: Denominator
) -> Float[Tensor, ""]:
    """-A logp: Williams, "Simple statistical gradient-following algorithms", 1992."""
    return -masked_sum(logp * per_decision(advantages).to(logp), mask, denominator)


def pairwise_ranking(
    logp: PerRow, rewards: PerRow, group_ids: Int64[Tensor, " rows"], *, denominator: float
) -> Float[Tensor, ""]:
    """-log sigmoid(logp_i - logp_j), summed over the pairs of each group in which i has the higher reward."""
    groups = Groups.of(group_ids)
    table = groups.to_table(logp, fill=0.0)
    losses = -logsigmoid(table[:, :, None] - table[:, None, :])
    better = _better(groups.to_table(rewards))
    return torch.where(better, losses, torch.zeros_like(losses)).sum() / denominator


def pairwise_weights(logp: PerRow, rewards: PerRow, group_ids: Int64[Tensor, " rows"]) -> PerRow:
    """Minus the gradient of the summed `pairwise_ranking` with respect to each row's logp.

    With these weights as advantages, `policy_gradient` has the gradient of the ranking loss. They need the values, not
    the graphs, of the group's other rows, which may be in another pass or on another rank.
    """
    groups = Groups.of(group_ids)
    table = groups.to_table(logp.detach(), fill=0.0)
    loss_probability = torch.sigmoid(table[:, None, :] - table[:, :, None])  # 1 - sigmoid(logp_i - logp_j)
    weights = torch.where(_better(groups.to_table(rewards)), loss_probability, torch.zeros_like(loss_probability))
    return groups.to_rows(weights.sum(2) - weights.sum(1))


def count_pairs(rewards: PerRow, group_ids: Int64[Tensor, " rows"]) -> int:
    """Pairs of each group with different rewards; ties and missing rewards make none."""
    return int(_better(Groups.of(group_ids).to_table(rewards)).sum())


def kl_to_reference(
    logp: PerDecision, reference_logp: PerDecision, mask: Mask, *, denominator: Denominator
) -> Float[Tensor, ""]:
    """exp(ref - logp) - (ref - logp) - 1: the k3 estimator (Schulman, "Approximating KL divergence", 2020)."""
    log_ratio = torch.where(mask, reference_logp.detach() - logp, torch.zeros_like(logp))
    return masked_sum(log_ratio.exp() - log_ratio - 1, mask, denominator)


def masked_sum(values: PerDecision, mask: Mask, denominator: Denominator) -> Float[Tensor, ""]:
    """Sum over unmasked decisions, each row divided by its denominator. Masked values may be NaN."""
    row_sums = torch.where(mask, values, torch.zeros_like(values)).sum(1)
    if isinstance(denominator, Tensor):
        denominator = denominator.to(row_sums)
    return (row_sums / denominator).sum()


def _better(rewards: Float[Tensor, "groups members"]) -> Bool[Tensor, "groups members members"]:
    """Whether i has a higher reward than j; a comparison with a missing reward (NaN) is false."""
    return rewards[:, :, None] > rewards[:, None, :]
