"""Predictors of accuracy: small networks that are told something of a question, and predict for each candidate how
likely its answer is right. Trained on answers under all candidates, they show what can be known from their inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from groupwise.workloads.controller.evaluate.exact import EvaluationSet
from groupwise.workloads.controller.policy.hidden_states import HiddenStateCache
from groupwise.workloads.controller.policy.network import normalize_features
from groupwise.workloads.controller.task import Question

Features = Callable[[Sequence[Question]], Float[Tensor, "questions features"]]
_HIDDEN, _DROPOUT = 128, 0.2
_ROWS_PER_STEP, _LEARNING_RATE, _WEIGHT_DECAY = 128, 2e-3, 0.05
_STEPS_BETWEEN_CHECKS = 100
_PICTURES_PER_HELD_OUT = 5
"""One picture in five is held out, and the weights that predict those best are kept."""
_SMALLEST_STD = 0.05
"""Rare words must not become huge numbers."""
_PREFILLS_AT_ONCE = 16


def words_of(questions: Sequence[Question]) -> Features:
    """The bag of words: which of these questions' tokens a question contains."""
    tokens = sorted({token for question in questions for token in question.sample.question_ids})
    column = {token: index for index, token in enumerate(tokens)}

    def words(asked: Sequence[Question]) -> Float[Tensor, "questions features"]:
        features = torch.zeros(len(asked), len(column))
        for row, question in enumerate(asked):
            features[row, [column[token] for token in question.sample.question_ids if token in column]] = 1.0
        return features

    return words


def overview_of(hidden_states: HiddenStateCache) -> Features:
    """The pixels of the overview."""
    return hidden_states.overviews


def latency_tokens_of(hidden_states: HiddenStateCache) -> Features:
    """The latency tokens of all tiers at the middle insertion position: more than the controller sees, which has to
    choose a tier first."""
    options = hidden_states.executor.options
    position = len(options.insertion_positions) // 2

    def one_tier(asked: Sequence[Question], tier: int) -> Float[Tensor, "questions width"]:
        row = torch.ones(len(asked), dtype=torch.int64)
        tokens, _ = hidden_states.latency_tokens(asked, tier * row, position * row)
        return normalize_features(tokens)

    def some(asked: Sequence[Question]) -> Float[Tensor, "questions features"]:
        return torch.cat([one_tier(asked, tier) for tier in range(len(options.crops_by_tier))], dim=1)

    def tokens(asked: Sequence[Question]) -> Float[Tensor, "questions features"]:
        parts = [asked[first : first + _PREFILLS_AT_ONCE] for first in range(0, len(asked), _PREFILLS_AT_ONCE)]
        return torch.cat([some(part) for part in parts])

    return tokens


def join(*features: Features) -> Features:
    return lambda asked: torch.cat([part(asked) for part in features], dim=1)


@dataclass(frozen=True)
class Predictor:
    """The predicted accuracy of each candidate, from the features of a question."""

    features: Features
    scale: tuple[Float[Tensor, " features"], Float[Tensor, " features"]]
    """Mean and standard deviation of the features."""
    base: Predictor | Float[Tensor, " columns"]
    """What the network's logits are added to: another predictor's, or those of the mean accuracies."""
    network: nn.Module
    column_of: Int64[Tensor, " candidates"]
    """Candidates that compute the same share a column."""

    @torch.no_grad()
    def __call__(self, questions: Sequence[Question]) -> Float[Tensor, "questions candidates"]:
        return self.logits(questions)[:, self.column_of].sigmoid()

    def logits(self, questions: Sequence[Question]) -> Float[Tensor, "questions columns"]:
        mean, std = self.scale
        base = self.base.logits(questions) if isinstance(self.base, Predictor) else self.base
        return base + self.network((self.features(questions) - mean) / std)


def train_predictor(
    fit_set: EvaluationSet,
    features: Features,
    first_equal: Sequence[int],
    *,
    steps: int,
    base: Predictor | None = None,
    seed: int = 0,
) -> Predictor:
    """Minimize the cross entropy of all candidates' accuracies; keep the weights that are best on held-out pictures.

    `first_equal` names for each candidate the first that computes the same. A predictor with a `base` starts as that
    one, and learns what its own features add.
    """
    columns = sorted(set(first_equal))
    targets = fit_set.accuracy[:, columns].float()
    held_out = _held_out(fit_set.pictures, seed)
    inputs = features(fit_set.questions)
    std, mean = torch.std_mean(inputs[~held_out], dim=0, correction=0)
    scale = mean, std.clamp(min=_SMALLEST_STD)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        network = _network(inputs.shape[1], len(columns))
        column_of = torch.tensor([columns.index(first) for first in first_equal])
        mean_logits = _mean_logits(targets[~held_out])
        start = mean_logits.expand_as(targets) if base is None else base.logits(fit_set.questions)
        _fit(network, (inputs - scale[0]) / scale[1], start, targets, held_out, steps=steps)
    return Predictor(features, scale, base or mean_logits, network, column_of)


def _fit(
    network: nn.Module,
    inputs: Float[Tensor, "questions features"],
    start: Float[Tensor, "questions columns"],
    targets: Float[Tensor, "questions columns"],
    held_out: Bool[Tensor, " questions"],
    *,
    steps: int,
) -> None:
    known = (~targets.isnan()).float()
    targets = targets.nan_to_num(0.0)

    def loss(rows: Int64[Tensor, " rows"]) -> Float[Tensor, ""]:
        logits, weight = start[rows] + network(inputs[rows]), known[rows]
        total = binary_cross_entropy_with_logits(logits, targets[rows], weight, reduction="sum")
        return total / weight.sum().clamp(min=1.0)

    def held_out_loss() -> float:
        network.eval()
        with torch.no_grad():
            value = loss(checked).item()
        network.train()
        return value

    trained_on = (~held_out).nonzero()[:, 0]
    checked = held_out.nonzero()[:, 0] if held_out.any() else trained_on
    optimizer = torch.optim.AdamW(network.parameters(), lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    best, weights = held_out_loss(), _copy(network.state_dict())
    for step in range(1, steps + 1):
        rows = trained_on[torch.randint(len(trained_on), (_ROWS_PER_STEP,))]
        optimizer.zero_grad()
        loss(rows).backward()
        optimizer.step()
        schedule.step()
        if step % _STEPS_BETWEEN_CHECKS == 0 or step == steps:
            reached = held_out_loss()
            if reached < best:
                best, weights = reached, _copy(network.state_dict())
    network.load_state_dict(weights)
    network.eval().requires_grad_(False)


def _network(features: int, columns: int) -> nn.Module:
    """Adds nothing until it is trained."""
    last = nn.Linear(_HIDDEN, columns)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    first = [nn.Linear(features, _HIDDEN), nn.ReLU(), nn.Dropout(_DROPOUT)]
    return nn.Sequential(*first, nn.Linear(_HIDDEN, _HIDDEN), nn.ReLU(), nn.Dropout(_DROPOUT), last)


def _mean_logits(targets: Float[Tensor, "questions columns"]) -> Float[Tensor, " columns"]:
    return targets.nanmean(0).nan_to_num(0.0).clamp(0.01, 0.99).logit()


def _held_out(pictures: Sequence[str], seed: int) -> Bool[Tensor, " questions"]:
    """Questions about one picture in five, at least about one if there are two."""
    distinct = list(dict.fromkeys(pictures))
    order = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(seed)).tolist()
    count = max(min(1, len(distinct) - 1), len(distinct) // _PICTURES_PER_HELD_OUT)
    held_out = {distinct[index] for index in order[:count]}
    return torch.tensor([picture in held_out for picture in pictures])


def _copy(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in weights.items()}
