"""ControllerServer: answers requests under budgets with a trained network; and the timer of such answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool

from groupwise.latency.meter import LatencyMeter, find_model_parts
from groupwise.latency.records import MeasuredLatency
from groupwise.workloads.controller.conditions import Conditions
from groupwise.workloads.controller.latency.estimates import KnobTable
from groupwise.workloads.controller.model.adapters import Sample
from groupwise.workloads.controller.model.adapters.base import overview_pixels
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor, PrefixItem, PrefixStates
from groupwise.workloads.controller.model.knobs import Knobs
from groupwise.workloads.controller.policy.decide import DECISION_ORDER
from groupwise.workloads.controller.policy.hidden_states import mean_embedding
from groupwise.workloads.controller.policy.network import ControllerNetwork

ConfigurationSet = int
"""A set as one number, with a byte per configuration: a decision is then a few operations on integers."""


@dataclass(frozen=True)
class BudgetLimit:
    """A budget in the terms of the controller."""

    limit_ms: float
    """Infinite where the budget is soft."""
    relative_budget: float
    """Where the budget is between the cheapest configuration (0) and the full one (1)."""
    bound_ms: KnobTable
    """What is compared with the limit, for every configuration."""


def budget_limit(bound_ms: KnobTable, budget_ms: float, relative_budget: float, *, is_hard: bool) -> BudgetLimit:
    """Under a soft budget every configuration can be chosen, if some fits; else what fits, or the cheapest."""
    unlimited = not is_hard and bool((bound_ms <= budget_ms).any())
    return BudgetLimit(torch.inf if unlimited else budget_ms, relative_budget, bound_ms)


def budget_limit_of(conditions: Conditions, row: int) -> BudgetLimit:
    """The budget of one condition."""
    (bound_ms,) = conditions.bound_ms(torch.tensor([row]))
    budget_ms, relative_budget = float(conditions.budget_ms[row]), float(conditions.relative_budget[row])
    return budget_limit(bound_ms, budget_ms, relative_budget, is_hard=conditions.config.is_hard)


@dataclass(frozen=True)
class ServedAnswer:
    tokens: tuple[int, ...]
    knobs: Knobs
    choices: tuple[int, ...]
    """The knobs as indices of options."""
    stage_one_ms: float
    """Measured, for all requests of the call. The terms of a budget that was served before are cached."""
    stage_two_ms: float

    @property
    def controller_ms(self) -> float:
        """The controller's own time."""
        return self.stage_one_ms + self.stage_two_ms


class ControllerServer:
    """A network with its current weights and an executor. Nothing that was computed for a sample is kept."""

    def __init__(
        self, network: ControllerNetwork, executor: Executor, *, max_new_tokens: int = 1, stop_token: int | None = None
    ):
        self.executor, self.max_new_tokens, self.stop_token = executor, max_new_tokens, stop_token
        self._network = network.fused()
        self._masks = _option_masks(executor.options.shape)
        self._tiers = list(executor.options.crops_by_tier)
        self._accelerated = torch.accelerator.is_available()

    @torch.inference_mode()
    def serve(self, requests: Sequence[tuple[Sample, BudgetLimit]]) -> list[ServedAnswer]:
        """The most probable knobs that fit each limit, and the model's answers with them.

        Only the chosen tier is encoded, only the blocks up to the chosen position run before the second stage, and the
        answer continues from there. One request or many: knobs and answers are those of each alone.
        """
        started = self._now_ms()
        choices = [self._stage_one(sample, limit) for sample, limit in requests]
        stage_one_ms = self._now_ms() - started

        prefix = self._run_prefix(choices)

        started = self._now_ms()
        for chosen in choices:
            self._stage_two(chosen, prefix)
        stage_two_ms = self._now_ms() - started

        answers, _ = self.executor.answer(
            [AnswerRequest(chosen.sample, chosen.knobs) for chosen in choices],
            prefix=prefix,
            max_new_tokens=self.max_new_tokens,
            stop_token=self.stop_token,
        )
        return [
            ServedAnswer(answer.tokens, chosen.knobs, chosen.indices, stage_one_ms, stage_two_ms)
            for answer, chosen in zip(answers, choices, strict=True)
        ]

    def _stage_one(self, sample: Sample, limit: BudgetLimit) -> _Choices:
        chosen = _Choices(sample, limit.relative_budget, self._masks, _feasible(limit))
        embedding = mean_embedding(self.executor, sample.question_ids)
        overview = overview_pixels(sample) if self._network.sees_overview else None
        tier_scores, position_scores = self._network.stage_one(embedding, overview, limit.relative_budget)
        chosen.tier = self._tiers[chosen.choose(tier_scores)]
        chosen.position = self.executor.options.insertion_positions[chosen.choose(position_scores)]
        return chosen

    def _run_prefix(self, choices: Sequence[_Choices]) -> PrefixStates:
        """Each (sample, tier) once, up to the latest position that was chosen for it."""
        items: dict[tuple[str, str], PrefixItem] = {}
        for chosen in choices:
            key = chosen.sample.name, chosen.tier
            if key not in items or (items[key].until or 0) < chosen.position:
                items[key] = PrefixItem([chosen.sample], chosen.tier, until=chosen.position)
        return self.executor.run_prefix(list(items.values()), keep_keys_values=self.max_new_tokens > 1)

    def _stage_two(self, chosen: _Choices, prefix: PrefixStates) -> None:
        options = self.executor.options
        token = prefix.latency_tokens[chosen.sample.name, chosen.tier][chosen.position].to("cpu", torch.float32)
        top_k_scores, block_scores = self._network.stage_two(token, chosen.taken[1], chosen.relative_budget)
        blocks = options.block_totals[chosen.choose(block_scores)]
        chosen.knobs = Knobs(chosen.tier, chosen.position, options.top_ks[chosen.choose(top_k_scores)], blocks)

    def _now_ms(self) -> float:
        if self._accelerated:
            torch.accelerator.synchronize()
        return 1000 * time.perf_counter()


@dataclass
class _Choices:
    """The decisions about one request, while they are taken."""

    sample: Sample
    relative_budget: float
    masks: Sequence[Sequence[ConfigurationSet]]
    """The configurations that have an option, by decision and option in the order decisions are taken."""
    feasible: ConfigurationSet
    """Those that are left."""
    taken: list[int] = field(default_factory=list)
    tier: str = field(init=False)
    position: int = field(init=False)
    knobs: Knobs = field(init=False)

    def choose(self, scores: Sequence[float]) -> int:
        """The index of the best option that some feasible configuration has."""
        masks = self.masks[len(self.taken)]
        best = max((option for option, mask in enumerate(masks) if mask & self.feasible), key=scores.__getitem__)
        self.feasible &= masks[best]
        self.taken.append(best)
        return best

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(self.taken[decision] for decision in DECISION_ORDER)


def _feasible(limit: BudgetLimit) -> ConfigurationSet:
    """Configurations within the limit, or the cheapest if none is."""
    within = _configuration_set((limit.bound_ms <= limit.limit_ms).numpy())
    return within or 1 << 8 * int(limit.bound_ms.argmin())


def _option_masks(shape: tuple[int, ...]) -> list[list[ConfigurationSet]]:
    """The configurations that have each option of each decision, in the order decisions are taken."""
    indices = np.indices(shape)
    return [
        [_configuration_set(indices[decision] == option) for option in range(shape[decision])]
        for decision in DECISION_ORDER
    ]


def _configuration_set(chosen: Bool[np.ndarray, "tiers positions top_ks blocks"]) -> ConfigurationSet:
    return int.from_bytes(chosen.tobytes(), "little")


class ServedTimer:
    """Times one answer with given knobs as a controller serves it, both stages included.

    The time of the decisions does not depend on the network's weights, so an untrained one is timed, with the given
    knobs as the only feasible configuration.
    """

    def __init__(self, executor: Executor, *, clock: Callable[[], float] = time.perf_counter):
        self._executor = executor
        width = executor.adapter.text_config.hidden_size
        self._network = ControllerNetwork(width, executor.options).to(executor.adapter.model.device)
        self._index = {knobs: index for index, knobs in enumerate(executor.options.configurations())}
        self._servers: dict[int, ControllerServer] = {}
        self._meter = LatencyMeter(find_model_parts(executor.adapter.model), clock=clock)

    def __call__(self, executor: Executor, request: AnswerRequest, new_tokens: int) -> MeasuredLatency:
        assert executor is self._executor, "a timer belongs to one executor"
        bound_ms = torch.full((len(self._index),), torch.inf, dtype=torch.float64)
        bound_ms[self._index[request.knobs]] = 1.0
        only = BudgetLimit(limit_ms=1.0, relative_budget=0.5, bound_ms=bound_ms.view(executor.options.shape))
        if new_tokens not in self._servers:
            self._servers[new_tokens] = ControllerServer(self._network, executor, max_new_tokens=new_tokens)
        return self._meter.time(lambda: self._servers[new_tokens].serve([(request.sample, only)]))
