"""The controller's network: a budget encoder, a first stage before the model runs, a second one inside it."""

from __future__ import annotations

from collections.abc import Sequence
from math import pi

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm

from groupwise.workloads.controller.latency.estimates import table_shape
from groupwise.workloads.controller.model.knobs import KnobOptions

ENCODED, FIRST, SECOND = 256, 256, 128
"""Widths of the encoded budget and of the two stages."""
FREQUENCIES = 16
MASKED_LOGIT = -1e4
"""Log-odds of what may not be chosen: its probability is exactly 0, and 0 x log 0 stays 0."""


class BudgetEncoder(nn.Module):
    """A budget between the cheapest (0) and the full configuration (1), scaled by 2 pi, as waves, through an MLP.

    The waves run from a quarter of a turn over the whole range to 16 turns. Without the 2 pi, and with the falling
    frequencies of position encodings, most of them would not move at all.
    """

    turns: Tensor

    def __init__(self, width: int = ENCODED):
        super().__init__()
        self.register_buffer("turns", 2.0 ** torch.linspace(-2, 4, FREQUENCIES), persistent=False)
        self.mlp = nn.Sequential(nn.Linear(2 * FREQUENCIES, width), nn.GELU(), nn.Linear(width, width))

    def waves(self, budget: Float[Tensor, " rows"]) -> Float[Tensor, "rows waves"]:
        angles = 2 * pi * budget[:, None] * self.turns
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    def forward(self, budget: Float[Tensor, " rows"]) -> Float[Tensor, "rows encoded"]:
        return self.mlp(self.waves(budget))


class OptionHead(nn.Module):
    """Log-odds of some options; with a single one there is nothing to learn, and no weight."""

    def __init__(self, width: int, options: int):
        super().__init__()
        self.options = options
        self.linear = nn.Linear(width, options) if options > 1 else None

    def forward(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows options"]:
        return hidden.new_zeros(len(hidden), 1) if self.linear is None else self.linear(hidden)


class StageOne(nn.Module):
    """From what is asked and how long it may take: the tier and the insertion position."""

    def __init__(self, width: int, tiers: int, positions: int):
        super().__init__()
        self.prompt, self.budget = nn.Linear(width, FIRST), nn.Linear(ENCODED, FIRST)
        self.join = nn.Linear(2 * FIRST, FIRST)
        self.tier, self.insertion = OptionHead(FIRST, tiers), OptionHead(FIRST, positions)

    def forward(self, prompt: Float[Tensor, "rows width"], budget: Float[Tensor, "rows encoded"]) -> list[Tensor]:
        parts = torch.cat([self.prompt(normalize_features(prompt)), self.budget(budget)], dim=1)
        hidden = gelu(self.join(gelu(parts)))
        return [self.tier(hidden), self.insertion(hidden)]


class StageTwo(nn.Module):
    """From the latency token where it was read, and how long the answer may take: the top-k and the blocks."""

    def __init__(self, width: int, positions: int, top_ks: int, totals: int):
        super().__init__()
        self.token, self.budget = nn.Linear(width, SECOND), nn.Linear(ENCODED, SECOND)
        self.position = nn.Embedding(positions, SECOND)
        self.join = nn.Linear(SECOND, SECOND)
        self.top_k, self.blocks = OptionHead(SECOND, top_ks), OptionHead(SECOND, totals)

    def forward(
        self,
        token: Float[Tensor, "rows width"],
        position: Int64[Tensor, " rows"],
        budget: Float[Tensor, "distinct encoded"],
        budget_of_row: Int64[Tensor, " rows"],
    ) -> list[Tensor]:
        spare = self.budget(budget).index_select(0, budget_of_row)
        mixed = self.token(normalize_features(token)) + self.position(position) + spare
        hidden = gelu(self.join(gelu(mixed)))
        return [self.top_k(hidden), self.blocks(hidden)]


class ControllerNetwork(nn.Module):
    """Everything that is trained: about a million numbers at width 2048."""

    def __init__(self, width: int, options: KnobOptions, *, seed: int = 0):
        super().__init__()
        tiers, positions, top_ks, totals = table_shape(options)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # the same weights on every rank
            self.encoder = BudgetEncoder()
            self.stage_one = StageOne(width, tiers, positions)
            self.stage_two = StageTwo(width, positions, top_ks, totals)


def parameter_counts(policy: nn.Module) -> dict[str, int]:
    """Numbers to train, by part."""
    return {name: sum(weight.numel() for weight in part.parameters()) for name, part in policy.named_children()}


def allowed_options(
    fits: Bool[Tensor, "rows ..."], taken: Sequence[Int64[Tensor, " rows"]]
) -> Bool[Tensor, "rows options"]:
    """Which options of the next decision some completion of fits, after the decisions already taken."""
    for choice in taken:
        fits = fits[torch.arange(len(fits), device=fits.device), choice]
    return fits.flatten(2).any(2) if fits.ndim > 2 else fits


def masked_log_softmax(
    logits: Float[Tensor, "*rows options"], allowed: Bool[Tensor, "*rows options"]
) -> Float[Tensor, "*rows options"]:
    """Log-probabilities among what is allowed."""
    return logits.masked_fill(~allowed, MASKED_LOGIT).log_softmax(-1)


def normalize_features(features: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
    """Hidden states of large models have a few huge entries, embeddings are tiny: bring both to one scale."""
    return layer_norm(features, features.shape[-1:])
