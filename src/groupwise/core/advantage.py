"""Group-relative advantages, per rollout or per decision.

Missing rewards (NaN) are left out of their group's statistics; groups without spread contribute no gradient.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from groupwise.core.config import AdvantageConfig
from groupwise.core.groups import Groups
from groupwise.core.reward import Rewards
from groupwise.core.types import Advantages


def compute_advantages(
    rewards: Rewards, group_ids: Int64[Tensor, " rollouts"], config: AdvantageConfig | None = None
) -> Advantages:
    """Advantages of rollouts, or of each decision where decisions have rewards of their own.

    Decision d is compared with decision d of the group's other members, by total + its own reward. A decision without
    spread or reward is not trained; a rollout is not trained where none of its decisions is.
    """
    if rewards.per_decision is None:
        return group_advantages(rewards.total, group_ids, config)
    columns = [group_advantages(rewards.total + column, group_ids, config) for column in rewards.per_decision.unbind(1)]
    trained = torch.stack([column.trained for column in columns], dim=1)
    has_spread = Groups.of(group_ids).to_table(trained.any(1).double(), fill=0.0).any(1)
    return Advantages(
        values=torch.stack([column.values for column in columns], dim=1),
        trained=trained.any(1),
        groups=columns[0].groups,
        zero_spread_groups=int((~has_spread).sum()),
        trained_mask=trained,
    )


def group_advantages(
    rewards: Float[Tensor, " rollouts"],
    group_ids: Int64[Tensor, " rollouts"],
    config: AdvantageConfig | None = None,
) -> Advantages:
    """Compare every rollout with the members of its group. Standard deviations are of the population (divided by n).

    group_std      (r - mean) / (std of the group + eps)   Shao et al., DeepSeekMath, arXiv 2402.03300
    batch_std      (r - mean) / (std of the step + eps)    Liu et al., Lite PPO, arXiv 2508.08221
    centered        r - mean                                Liu et al., Dr. GRPO, arXiv 2503.20783
    leave_one_out  r - mean of the other members           Ahmadian et al., RLOO, arXiv 2402.14740
    """
    config = config or AdvantageConfig()
    groups = Groups.of(group_ids)
    table = groups.to_table(rewards.double())
    present = ~table.isnan()
    members = present.sum(1, keepdim=True)
    mean = table.nansum(1, keepdim=True) / members.clamp(min=1)
    has_spread = _has_spread(table)
    values = (table - mean) * _scale(table, mean, members, config)
    if config.clip is not None:
        values = values.clamp(-config.clip, config.clip)
    trained = present & has_spread
    values = torch.where(trained, values, torch.zeros_like(values))
    return Advantages(
        values=groups.to_rows(values).to(rewards.dtype),
        trained=groups.to_rows(trained),
        groups=groups.num_groups,
        zero_spread_groups=int((~has_spread).sum()),
    )


def _has_spread(table: Tensor) -> Tensor:
    """Whether a group's rewards differ, by exact comparison: even a small std is worth learning from."""
    low = table.masked_fill(table.isnan(), torch.inf).amin(1, keepdim=True)
    high = table.masked_fill(table.isnan(), -torch.inf).amax(1, keepdim=True)
    return low < high


def _scale(table: Tensor, mean: Tensor, members: Tensor, config: AdvantageConfig) -> Tensor:
    one = torch.ones_like(mean)
    if config.kind == "centered":
        return one
    if config.kind == "leave_one_out":
        return one * members / (members - 1).clamp(min=1)
    if config.kind == "batch_std":
        present = table[~table.isnan()]
        std = present.std(correction=0) if len(present) else torch.zeros((), dtype=table.dtype)
        return one / (std + config.eps)
    std = ((table - mean) ** 2).nansum(1, keepdim=True).div(members.clamp(min=1)).sqrt()
    return torch.where(std + config.eps > 0, 1 / (std + config.eps), one)
