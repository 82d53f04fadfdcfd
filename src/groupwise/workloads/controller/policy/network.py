"""ControllerNetwork: a budget encoder, stage one before the model runs and stage two inside it; and its fused form."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from math import pi

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn.functional import linear, relu

from groupwise.workloads.controller.config import (
    BUDGET_DIM,
    NUM_FREQUENCIES,
    OVERVIEW_PIXELS,
    STAGE_ONE_DIM,
    STAGE_TWO_DIM,
)
from groupwise.workloads.controller.model.knobs import KnobOptions

MASKED_LOGIT = -1e4
"""Logit of an option that may not be chosen: its probability is exactly 0, and 0 x log 0 stays 0."""


Affine = tuple[Float[Tensor, "outputs inputs"], Float[Tensor, " outputs"]]
"""Weight and bias."""


class BudgetEncoder(nn.Module):
    """A relative budget, from 0 (the cheapest configuration) to 1 (the full one), as sinusoids through an MLP.

    The sinusoids make from a quarter of a turn over the whole range to 16 turns. With the frequencies of position
    encodings most of them would hardly vary over this range.
    """

    frequencies: Tensor

    def __init__(self, width: int = BUDGET_DIM):
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.linspace(-2, 4, NUM_FREQUENCIES), persistent=False)
        self.mlp = nn.Sequential(nn.Linear(2 * NUM_FREQUENCIES, width), nn.ReLU(), nn.Linear(width, width))

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
    """From the question, the overview if it is shown, and the budget: tier and insertion position."""

    def __init__(self, width: int, tiers: int, positions: int, *, sees_overview: bool):
        super().__init__()
        self.prompt, self.budget = nn.Linear(width, STAGE_ONE_DIM), nn.Linear(BUDGET_DIM, STAGE_ONE_DIM)
        self.join = nn.Linear(2 * STAGE_ONE_DIM, STAGE_ONE_DIM)
        self.tier, self.insertion = OptionHead(STAGE_ONE_DIM, tiers), OptionHead(STAGE_ONE_DIM, positions)
        self.overview = nn.Linear(OVERVIEW_PIXELS, STAGE_ONE_DIM, bias=False) if sees_overview else None

    def forward(
        self,
        question: Float[Tensor, "rows width"],
        overview: Float[Tensor, "rows pixels"] | None,
        budget: Float[Tensor, "rows encoded"],
    ) -> list[Tensor]:
        prompt = self.prompt(normalize_features(question))
        if self.overview is not None:
            # As they are: how bright the image is matters.
            prompt = prompt + self.overview(overview)
        hidden = relu(self.join(relu(torch.cat([prompt, self.budget(budget)], dim=1))))
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
        hidden = relu(self.join(relu(mixed)))
        return [self.top_k(hidden), self.blocks(hidden)]


class ControllerNetwork(nn.Module):
    """Everything that is trained: about a million parameters at width 2048."""

    sees_overview: bool

    def __init__(self, width: int, options: KnobOptions, *, sees_overview: bool = True, seed: int = 0):
        super().__init__()
        self.sees_overview = sees_overview
        tiers, positions, top_ks, totals = options.shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # the same weights on every rank
            self.encoder = BudgetEncoder()
            self.stage_one = StageOne(width, tiers, positions, sees_overview=sees_overview)
            self.stage_two = StageTwo(width, positions, top_ks, totals)

    def fused(self) -> FusedNetwork:
        """The same function with the current weights, fast for single rows on the CPU."""
        return FusedNetwork(self)


class FusedNetwork:
    """A copy of a ControllerNetwork for one row at a time, in float32 on the CPU.

    At this size the calls take the time, not the arithmetic: the heads of a stage are concatenated, everything that
    depends on the budget alone is computed once per budget, and the rest is a few matrix-vector products with tensors
    that are at hand.
    """

    def __init__(self, network: ControllerNetwork):
        self._network = deepcopy(network).requires_grad_(False).float().cpu()
        self.sees_overview = network.sees_overview
        one, two = self._network.stage_one, self._network.stage_two
        join_question, self._join_budget = one.join.weight.split(STAGE_ONE_DIM, dim=1)
        self._prompt = _parameters(one.prompt)
        self._overview = None if one.overview is None else one.overview.weight.data
        self._join_question = join_question.contiguous()
        self._heads_one = _concat_heads(one.tier, one.insertion, STAGE_ONE_DIM)
        self._token, self._join_two = two.token.weight.data, _parameters(two.join)
        self._heads_two = _concat_heads(two.top_k, two.blocks, STAGE_TWO_DIM)
        self._tiers, self._top_ks = one.tier.options, two.top_k.options
        self._terms: dict[float, tuple[Tensor, Sequence[Tensor]]] = {}

    def stage_one(
        self, question: Float[Tensor, " width"], overview: Float[Tensor, " pixels"] | None, budget: float
    ) -> tuple[list[float], list[float]]:
        """Logits of the tiers and of the insertion positions."""
        budget_term, _ = self._budget_terms(budget)
        prompt = _affine(self._prompt, normalize_features(question))
        if self._overview is not None:
            assert overview is not None, "stage one looks"
            prompt.addmv_(self._overview, overview)
        hidden = torch.addmv(budget_term, self._join_question, prompt.relu_())
        scores = _affine(self._heads_one, hidden.relu_()).tolist()
        return scores[: self._tiers], scores[self._tiers :]

    def stage_two(
        self, token: Float[Tensor, " width"], position: int, budget: float
    ) -> tuple[list[float], list[float]]:
        """Logits of the top-ks and of the block totals. `position` is the index of the insertion position."""
        _, budget_terms = self._budget_terms(budget)
        mixed = torch.addmv(budget_terms[position], self._token, normalize_features(token))
        hidden = _affine(self._join_two, mixed.relu_())
        scores = _affine(self._heads_two, hidden.relu_()).tolist()
        return scores[: self._top_ks], scores[self._top_ks :]

    def _budget_terms(self, budget: float) -> tuple[Float[Tensor, " stage_one"], Sequence[Float[Tensor, " stage_two"]]]:
        """What a budget adds to the second layer of stage one, and to the first layer of stage two by position."""
        if budget not in self._terms:
            one, two = self._network.stage_one, self._network.stage_two
            encoded = self._network.encoder(torch.tensor([budget]))
            term = linear(relu(one.budget(encoded)), self._join_budget, one.join.bias)[0]
            self._terms[budget] = term, (two.token.bias + two.position.weight + two.budget(encoded)).unbind()
        return self._terms[budget]


def _parameters(layer: nn.Linear) -> Affine:
    return layer.weight.data, layer.bias.data


def _affine(parameters: Affine, features: Float[Tensor, " inputs"]) -> Float[Tensor, " outputs"]:
    weight, bias = parameters
    return torch.addmv(bias, weight, features)


def _concat_heads(first: OptionHead, second: OptionHead, width: int) -> Affine:
    """Two heads as one; a single option has logit 0."""
    single = torch.zeros(1, width), torch.zeros(1)
    parts = [single if head.linear is None else _parameters(head.linear) for head in (first, second)]
    weights, biases = zip(*parts, strict=True)
    return torch.cat(weights), torch.cat(biases)


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
