"""The reward of one answer, as named terms. Latency is the estimator's: the same choice always earns the same.

    accuracy   how right the answer is, 0 to 1
    late       -0.5 sigmoid(10 (r - 1))                               with the penalty only
    overrun    -10 max(0, r - 1)^2                                    with the penalty only
    saving     0.1 (1 - r) where r <= 1, else 0                       with the penalty only
    cost       -0.05 (crops / most crops + top_k / (4 full top_k) + blocks / all blocks) / 3

r is the estimated median over the budget, both of the same span. With 12 crops, top-8 and 16 blocks the cost is that of
the formula's source, -0.05 (crops / 12 + top_k / 32 + blocks / 16) / 3.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.workloads.controller.estimates import Table
from groupwise.workloads.controller.knobs import KnobOptions


def cost_table(options: KnobOptions) -> Table:
    """The term `cost` of every configuration."""
    most_crops, most_experts = max(1, *options.crops.values()), 4 * max(1, options.full_top_k)  # dense models have none
    crops = torch.tensor(list(options.crops.values()), dtype=torch.float64) / most_crops
    top_ks = torch.tensor(list(options.top_ks), dtype=torch.float64) / most_experts
    blocks = torch.tensor(list(options.block_totals), dtype=torch.float64) / options.total_blocks
    one = crops[:, None, None, None] + top_ks[:, None] + blocks
    return -0.05 / 3 * one.expand(-1, len(options.insertion_positions), -1, -1)


def penalty_terms(ratio: Float[Tensor, "*rows"]) -> dict[str, Float[Tensor, "*rows"]]:
    """What missing the budget costs, and what staying under it earns."""
    return {
        "late": -0.5 * torch.sigmoid(10 * (ratio - 1)),
        "overrun": -10 * (ratio - 1).clamp(min=0) ** 2,
        "saving": torch.where(ratio <= 1, 0.1 * (1 - ratio), torch.zeros_like(ratio)),
    }
