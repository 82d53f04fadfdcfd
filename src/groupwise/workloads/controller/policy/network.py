"""ControllerNetwork: a budget encoder, stage one before the model runs and stage two inside it; and its fused form."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from math import pi, sqrt

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from groupwise.workloads.controller.config import BUDGET_DIM, NUM_FREQUENCIES, STAGE_ONE_DIM, STAGE_TWO_DIM
from groupwise.workloads.controller.model.knobs import KnobOptions

MASKED_LOGIT = -1e4
"""Logit of an option that may not be chosen: its probability is exactly 0, and 0 x log 0 stays 0."""
_SQRT_HALF = sqrt(0.5)


class BudgetEncoder(nn.Module):
    """A relative budget, from 0 (the cheapest configuration) to 1 (the full one), as sinusoids through an MLP.

    The sinusoids make from a quarter of a turn over the whole range to 16 turns. With the frequencies of position
    encodings most of them would hardly vary over this range.
    """

    frequencies: Tensor

    def __init__(self, width: int = BUDGET_DIM):
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.linspace(-2, 4, NUM_FREQUENCIES), persistent=False)
        self.mlp = nn.Sequential(nn.Linear(2 * NUM_FREQUENCIES, width), nn.GELU(), nn.Linear(width, width))

    def sinusoids(self, budget: Float[Tensor, " rows"]) -> Float[Tensor, "rows sinusoids"]:
        angles = 2 * pi * budget[:, None] * self.frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    def forward(self, budget: Float[Tensor, " rows"]) -> Float[Tensor, "rows encoded"]:
        return self.mlp(self.sinusoids(budget))


class OptionHead(nn.Module):
    """Logits of a decision's options; without weights where there is a single option."""

    def __init__(self, width: int, options: int):
        super().__init__()
        self.options = options
        self.linear = nn.Linear(width, options) if options > 1 else None

    def forward(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows options"]:
        return hidden.new_zeros(len(hidden), 1) if self.linear is None else self.linear(hidden)


class StageOne(nn.Module):
    """From the question and the budget: tier and insertion position."""

    def __init__(self, width: int, tiers: int, positions: int):
        super().__init__()
        self.prompt, self.budget = nn.Linear(width, STAGE_ONE_DIM), nn.Linear(BUDGET_DIM, STAGE_ONE_DIM)
        self.join = nn.Linear(2 * STAGE_ONE_DIM, STAGE_ONE_DIM)
        self.tier, self.insertion = OptionHead(STAGE_ONE_DIM, tiers), OptionHead(STAGE_ONE_DIM, positions)

    def forward(self, question: Float[Tensor, "rows width"], budget: Float[Tensor, "rows encoded"]) -> list[Tensor]:
        parts = torch.cat([self.prompt(normalize_features(question)), self.budget(budget)], dim=1)
        hidden = gelu(self.join(gelu(parts)))
        return [self.tier(hidden), self.insertion(hidden)]


class StageTwo(nn.Module):
    """From the latency token at the insertion position and the budget: top-k and blocks."""

    def __init__(self, width: int, positions: int, top_ks: int, totals: int):
        super().__init__()
        self.token, self.budget = nn.Linear(width, STAGE_TWO_DIM), nn.Linear(BUDGET_DIM, STAGE_TWO_DIM)
        self.position = nn.Embedding(positions, STAGE_TWO_DIM)
        self.join = nn.Linear(STAGE_TWO_DIM, STAGE_TWO_DIM)
        self.top_k, self.blocks = OptionHead(STAGE_TWO_DIM, top_ks), OptionHead(STAGE_TWO_DIM, totals)

    def forward(
        self,
        token: Float[Tensor, "rows width"],
        position: Int64[Tensor, " rows"],
        budget: Float[Tensor, "distinct encoded"],
        budget_of_row: Int64[Tensor, " rows"],
    ) -> list[Tensor]:
        budget = self.budget(budget).index_select(0, budget_of_row)
        mixed = self.token(normalize_features(token)) + self.position(position) + budget
        hidden = gelu(self.join(gelu(mixed)))
        return [self.top_k(hidden), self.blocks(hidden)]


class ControllerNetwork(nn.Module):
    """Everything that is trained: about a million parameters at width 2048."""

    def __init__(self, width: int, options: KnobOptions, *, seed: int = 0):
        super().__init__()
        tiers, positions, top_ks, totals = options.shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # the same weights on every rank
            self.encoder = BudgetEncoder()
            self.stage_one = StageOne(width, tiers, positions)
            self.stage_two = StageTwo(width, positions, top_ks, totals)

    def fused(self) -> FusedNetwork:
        """The same function with the current weights, fast for single rows on the CPU."""
        return FusedNetwork(self)


class FusedNetwork:
    """A copy of a ControllerNetwork for one row at a time, in float32 on the CPU.

    At this size the calls take the time, not the arithmetic: the heads of a stage are concatenated, everything that
    depends on the budget alone is computed once per budget, the constants of gelu are in the weights (see `_gelu`), and
    the rest is a few matrix-vector products.
    """

    def __init__(self, network: ControllerNetwork):
        self._network = deepcopy(network).requires_grad_(False).float().cpu()
        one, two = self._network.stage_one, self._network.stage_two
        join_question, self._join_budget = one.join.weight.split(STAGE_ONE_DIM, dim=1)
        self._prompt = one.prompt.weight * _SQRT_HALF, one.prompt.bias * _SQRT_HALF
        self._join_question = join_question * 0.5
        self._heads_one = _concat_heads(one.tier, one.insertion, STAGE_ONE_DIM)
        self._token = two.token.weight * _SQRT_HALF
        self._join_two = two.join.weight * 0.5, two.join.bias * _SQRT_HALF
        self._heads_two = _concat_heads(two.top_k, two.blocks, STAGE_TWO_DIM)
        self._terms: dict[float, tuple[Tensor, Sequence[Tensor]]] = {}

    def stage_one(self, question: Float[Tensor, " width"], budget: float) -> tuple[list[float], list[float]]:
        """Logits of the tiers and of the insertion positions."""
        budget_term, _ = self._budget_terms(budget)
        weight, bias = self._prompt
        prompt = _gelu(torch.addmv(bias, weight, normalize_features(question)))
        hidden = _gelu(torch.addmv(budget_term, self._join_question, prompt))
        weight, bias = self._heads_one
        return _split_scores(torch.addmv(bias, weight, hidden), self._network.stage_one.tier.options)

    def stage_two(
        self, token: Float[Tensor, " width"], position: int, budget: float
    ) -> tuple[list[float], list[float]]:
        """Logits of the top-ks and of the block totals. `position` is the index of the insertion position."""
        _, budget_terms = self._budget_terms(budget)
        mixed = _gelu(torch.addmv(budget_terms[position], self._token, normalize_features(token)))
        weight, bias = self._join_two
        hidden = _gelu(torch.addmv(bias, weight, mixed))
        weight, bias = self._heads_two
        return _split_scores(torch.addmv(bias, weight, hidden), self._network.stage_two.top_k.options)

    def _budget_terms(self, budget: float) -> tuple[Float[Tensor, " stage_one"], Sequence[Float[Tensor, " stage_two"]]]:
        """What a budget adds to the second layer of stage one, and to the first layer of stage two by position."""
        if budget not in self._terms:
            one, two = self._network.stage_one, self._network.stage_two
            encoded = self._network.encoder(torch.tensor([budget]))
            term = linear(gelu(one.budget(encoded)), self._join_budget, one.join.bias)[0]
            terms_two = two.token.bias + two.position.weight + two.budget(encoded)
            self._terms[budget] = term * _SQRT_HALF, (terms_two * _SQRT_HALF).unbind()
        return self._terms[budget]


def _concat_heads(first: OptionHead, second: OptionHead, width: int) -> tuple[Tensor, Tensor]:
    """Weight and bias of two heads as one, to follow `_gelu`; a single option has logit 0."""
    single = torch.zeros(1, width), torch.zeros(1)
    parts = [single if head.linear is None else (head.linear.weight, head.linear.bias) for head in (first, second)]
    weights, biases = zip(*parts, strict=True)
    return torch.cat(weights) * _SQRT_HALF, torch.cat(biases)


def _split_scores(scores: Float[Tensor, " options"], first: int) -> tuple[list[float], list[float]]:
    values = scores.tolist()
    return values[:first], values[first:]


def _gelu(scaled: Float[Tensor, " width"]) -> Float[Tensor, " width"]:
    """sqrt(2) gelu(x) from x / sqrt(2), without a constant: the weights before and after have them."""
    return torch.addcmul(scaled, scaled, torch.erf(scaled))


def parameter_counts(network: nn.Module) -> dict[str, int]:
    """Trained parameters by part."""
    return {name: sum(weight.numel() for weight in part.parameters()) for name, part in network.named_children()}


def allowed_options(
    feasible: Bool[Tensor, "rows ..."], taken: Sequence[Int64[Tensor, " rows"]]
) -> Bool[Tensor, "rows options"]:
    """Options of the next decision that some feasible configuration has, after the decisions already taken."""
    for choice in taken:
        feasible = feasible[torch.arange(len(feasible), device=feasible.device), choice]
    return feasible.flatten(2).any(2) if feasible.ndim > 2 else feasible


def masked_log_softmax(
    logits: Float[Tensor, "*rows options"], allowed: Bool[Tensor, "*rows options"]
) -> Float[Tensor, "*rows options"]:
    """Log-probs among the allowed options."""
    return logits.masked_fill(~allowed, MASKED_LOGIT).log_softmax(-1)


def normalize_features(features: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
    """Hidden states of large models have a few huge entries, embeddings are tiny: bring both to one scale."""
    return torch.layer_norm(features, features.shape[-1:])
