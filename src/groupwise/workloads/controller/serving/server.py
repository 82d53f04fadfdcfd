"""One answer under a budget, as it is given in use: choose, look, choose again, go on. Nothing is remembered.
The time of answers as a controller gives them, for an estimator that is to keep its budgets.

Whatever the controller has learned, choosing takes it the same time; so an untrained one is timed, left with a single
choice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import gelu, linear

from groupwise.latency.meter import LatencyMeter, find_model_parts
from groupwise.latency.records import MeasuredLatency
from groupwise.workloads.controller.conditions import Conditions
from groupwise.workloads.controller.latency.estimates import KnobTable, table_shape
from groupwise.workloads.controller.model.adapters import Sample
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor
from groupwise.workloads.controller.model.knobs import Knobs
from groupwise.workloads.controller.policy.decide import DECISION_ORDER, Controller, HiddenStateCache
from groupwise.workloads.controller.policy.network import (
    FIRST,
    SECOND,
    ControllerNetwork,
    OptionHead,
    normalize_features,
)

_ROOT_OF_HALF = sqrt(0.5)


@dataclass(frozen=True)
class BudgetLimit:
    """What a question may take, in terms that the controller understands."""

    limit_ms: float
    """Infinite where the budget is only priced."""
    share: float
    """The budget between the cheapest configuration (0) and the full one (1)."""
    promised_ms: KnobTable
    """What is held against the limit, for every configuration."""


def budget_limit(promised_ms: KnobTable, budget_ms: float, share: float, *, guaranteed: bool) -> BudgetLimit:
    """What a budget lets the controller choose from: everything, if it is only priced and something fits."""
    free = not guaranteed and bool((promised_ms <= budget_ms).any())
    return BudgetLimit(torch.inf if free else budget_ms, share, promised_ms)


def budget_limit_of(conditions: Conditions, row: int) -> BudgetLimit:
    """The same for one condition."""
    (promised_ms,) = conditions.bound_ms(torch.tensor([row]))
    budget_ms, share = float(conditions.budget_ms[row]), float(conditions.relative_budget[row])
    return budget_limit(promised_ms, budget_ms, share, guaranteed=conditions.config.is_hard)


@dataclass(frozen=True)
class ServedAnswer:
    tokens: tuple[int, ...]
    knobs: Knobs
    choices: tuple[int, ...]
    """The same knobs as numbers of options."""
    stage_one_ms: float
    """Measured, with the masks and the mean embedding of the question; encoding a budget met before is remembered."""
    stage_two_ms: float

    @property
    def controller_ms(self) -> float:
        """The controller's own time."""
        return self.stage_one_ms + self.stage_two_ms


class ControllerServer:
    """A trained controller made ready for single requests: its weights as they are now, and budgets it has met.

    The choice is the network's own. What depends on the budget alone is computed once for each budget, heads are
    joined, and the rest is done by the processor in as few and cheap calls as can be: at this size they are what takes
    time, and an accelerator would be waited for.
    """

    def __init__(self, controller: Controller, *, max_new_tokens: int = 1, stop_token: int | None = None):
        self.executor = controller.features.executor
        self.max_new_tokens, self.stop_token = max_new_tokens, stop_token
        self.policy = deepcopy(controller.policy).requires_grad_(False).float().cpu()
        one, two = self.policy.stage_one, self.policy.stage_two
        self._join_prompt, self._join_budget = (part.contiguous() for part in one.join.weight.split(FIRST, dim=1))
        self._first, self._second = (
            _concat_heads(one.tier, one.insertion, FIRST),
            _concat_heads(two.top_k, two.blocks, SECOND),
        )
        self._budgets: dict[float, tuple[Tensor, Tensor]] = {}
        self._accelerated = torch.accelerator.is_available()

    @torch.inference_mode()
    def serve(self, sample: Sample, allowance: BudgetLimit) -> ServedAnswer:
        """The likeliest knobs that fit, and the model's answer under them.

        Only the chosen tier is looked at, and only the blocks up to the chosen position run before the second choice;
        the answer goes on from there.
        """
        executor, begun = self.executor, self._now_ms()
        fits, choices = _fitting(allowance), list[int]()
        for scores in self._stage_one(sample.question, allowance.share):
            fits = _choose(scores, fits, choices)
        tier, position = list(executor.options.crops)[choices[0]], executor.options.insertion_positions[choices[1]]
        chosen_at = self._now_ms()

        prefix = executor.prefix([(sample, tier)], positions=[position])
        looked_at = self._now_ms()

        reached = [each for each in executor.options.insertion_positions if each <= position]
        token = prefix.latency_tokens[sample.name, tier][reached.index(position)]
        top_k_scores, block_scores = self._stage_two(token, choices[1], allowance.share)
        fits = _choose(block_scores, fits, choices)
        _choose(top_k_scores, fits, choices)
        choices = [choices[nth] for nth in DECISION_ORDER]
        top_k, blocks = executor.options.top_ks[choices[2]], executor.options.block_totals[choices[3]]
        stage_two_ms = self._now_ms() - looked_at

        request = AnswerRequest(sample, Knobs(tier, position, top_k, blocks))
        (answer,), _ = executor.answer(
            [request], prefix=prefix, max_new_tokens=self.max_new_tokens, stop_token=self.stop_token
        )
        return ServedAnswer(answer.tokens, request.knobs, tuple(choices), chosen_at - begun, stage_two_ms)

    def _now_ms(self) -> float:
        if self._accelerated:
            torch.accelerator.synchronize()
        return 1000 * time.perf_counter()

    def _stage_one(self, question: tuple[int, ...], share: float) -> list[list[float]]:
        stage, words = self.policy.stage_one, self.executor.adapter.embed(torch.tensor(question))
        prompt = normalize_features(words.float().mean(0)).cpu()
        seen = _gelu(torch.addmv(stage.prompt.bias, stage.prompt.weight, prompt))
        hidden = _gelu(torch.addmv(self._prepared(share)[0], self._join_prompt, seen))
        return _split_scores(torch.addmv(self._first[1], self._first[0], hidden), stage.tier.options)

    def _stage_two(self, token: Float[Tensor, " width"], position: int, share: float) -> list[list[float]]:
        stage, seen = self.policy.stage_two, normalize_features(token.float()).cpu()
        mixed = _gelu(torch.addmv(self._prepared(share)[1][position], stage.token.weight, seen))
        hidden = _gelu(torch.addmv(stage.join.bias, stage.join.weight, mixed))
        return _split_scores(torch.addmv(self._second[1], self._second[0], hidden), stage.top_k.options)

    def _prepared(self, share: float) -> tuple[Tensor, Tensor]:
        """What a budget adds to the first stage's second layer, and to the second stage's first at every position."""
        if share not in self._budgets:
            one, two = self.policy.stage_one, self.policy.stage_two
            encoded = self.policy.encoder(torch.tensor([share]))
            first = linear(gelu(one.budget(encoded)), self._join_budget, one.join.bias)[0]
            self._budgets[share] = first, two.token.bias + two.position.weight + two.budget(encoded)
        return self._budgets[share]


def _concat_heads(one: OptionHead, other: OptionHead, width: int) -> tuple[Tensor, Tensor]:
    """Two heads as one; a single option scores 0."""
    nothing = torch.zeros(1, width), torch.zeros(1)
    parts = [nothing if head.linear is None else (head.linear.weight, head.linear.bias) for head in (one, other)]
    weights, biases = zip(*parts, strict=True)
    return torch.cat(weights), torch.cat(biases)


def _split_scores(scores: Float[Tensor, " options"], first: int) -> list[list[float]]:
    """Of two decisions, the first with so many options."""
    every = scores.tolist()
    return [every[:first], every[first:]]


def _gelu(values: Float[Tensor, " width"]) -> Float[Tensor, " width"]:
    """The same as torch's, whose kernel takes longer to begin than these to end."""
    return torch.erf(values * _ROOT_OF_HALF).add_(1).mul_(values).mul_(0.5)


def _fitting(allowance: BudgetLimit) -> Bool[np.ndarray, "tiers positions blocks top_ks"]:
    """What may be chosen, with axes in the order of decisions. Where nothing fits, the cheapest."""
    promised_ms = allowance.promised_ms.numpy()
    fits: np.ndarray = promised_ms <= allowance.limit_ms
    if not np.logical_or.reduce(fits, axis=None):
        fits.flat[promised_ms.argmin()] = True
    return fits.transpose(DECISION_ORDER)


def _choose(scores: Sequence[float], fits: np.ndarray, choices: list[int]) -> np.ndarray:
    """Choose the likeliest option that some completion of fits; what is left after it."""
    offered: list[bool] = np.logical_or.reduce(fits.reshape(len(fits), -1), axis=1).tolist()
    best = max((option for option, some in enumerate(offered) if some), key=scores.__getitem__)
    choices.append(best)
    left: np.ndarray = fits[best]
    return left


_SHARE = 0.5


class ServedTimer:
    """Times one answer with given knobs: both choices, the pass up to the second one, and the rest."""

    def __init__(self, executor: Executor, *, clock: Callable[[], float] = time.perf_counter):
        features = HiddenStateCache(executor)
        device = features.executor.adapter.model.device
        policy = ControllerNetwork(features.width, executor.options).to(device)
        self._controller = Controller(policy, features, device)
        self._number = {knobs: number for number, knobs in enumerate(executor.options.all())}
        self._servers: dict[int, ControllerServer] = {}
        self._meter = LatencyMeter(find_model_parts(executor.adapter.model), clock=clock)

    def __call__(self, executor: Executor, request: AnswerRequest, new_tokens: int) -> MeasuredLatency:
        promised = torch.full((len(self._number),), torch.inf, dtype=torch.float64)
        promised[self._number[request.knobs]] = 1.0
        only = BudgetLimit(limit_ms=1.0, share=_SHARE, promised_ms=promised.view(table_shape(executor.options)))
        if new_tokens not in self._servers:
            self._servers[new_tokens] = ControllerServer(self._controller, max_new_tokens=new_tokens)
        return self._meter.time(lambda: self._servers[new_tokens].serve(request.sample, only))
