"""ControllerServer: answers requests under budgets with a trained network; and the timer of such answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.latency.meter import LatencyMeter, find_model_parts
from groupwise.latency.records import MeasuredLatency
from groupwise.workloads.controller.model.adapters import Sample
from groupwise.workloads.controller.model.adapters.base import overview_pixels
from groupwise.workloads.controller.model.executor import (
    AnswerRequest,
    EmbeddedText,
    Executor,
    PrefixItem,
    PrefixStates,
    mean_embedding,
)
from groupwise.workloads.controller.model.knobs import Knobs
from groupwise.workloads.controller.policy.decide import DECISION_ORDER
from groupwise.workloads.controller.policy.network import ControllerNetwork
from groupwise.workloads.controller.serving.limits import BudgetLimit, LeastBounds, PacedBounds


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
        self,
        network: ControllerNetwork,
        executor: Executor,
        *,
        max_new_tokens: int = 1,
        stop_token: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.executor, self.max_new_tokens, self.stop_token = executor, max_new_tokens, stop_token
        self._network = network.fused()
        self._tiers = list(executor.options.crops_by_tier)
        self._clock, self._accelerated = clock, torch.accelerator.is_available()

    @torch.inference_mode()
    def serve(self, requests: Sequence[tuple[Sample, BudgetLimit]]) -> list[ServedAnswer]:
        """The most probable knobs that fit each limit, and the model's answers with them.

        Only the chosen tier is encoded, only the blocks up to the chosen position run before the second stage, and the
        answer continues from there. One request or many: knobs and answers are those of each alone.
        """
        embedded = [self.executor.adapter.embed_text(sample) for sample, _ in requests]  # the prefix pass needs it, too

        started = self._now_ms()
        choices = [self._stage_one(*request, states) for request, states in zip(requests, embedded, strict=True)]
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

    def _stage_one(self, sample: Sample, limit: BudgetLimit, embedded: Float[Tensor, "tokens width"]) -> _Choices:
        text = EmbeddedText(embedded, mean_embedding(embedded[len(sample.prefix_ids) :]))
        chosen = _Choices(sample, limit, text)
        overview = overview_pixels(sample) if self._network.sees_overview else None
        tier_scores, position_scores = self._network.stage_one(text.question_mean, overview, limit.relative_budget)
        chosen.tier = self._tiers[chosen.choose(tier_scores)]
        chosen.position = self.executor.options.insertion_positions[chosen.choose(position_scores)]
        return chosen

    def _run_prefix(self, choices: Sequence[_Choices]) -> PrefixStates:
        """Each (sample, tier) once, up to the latest position that was chosen for it."""
        items: dict[tuple[str, str], PrefixItem] = {}
        for chosen in choices:
            key = chosen.sample.name, chosen.tier
            if key not in items or (items[key].until or 0) < chosen.position:
                items[key] = PrefixItem([chosen.sample], chosen.tier, until=chosen.position, text=chosen.text)
        return self.executor.run_prefix(list(items.values()), keep_keys_values=self.max_new_tokens > 1)

    def _stage_two(self, chosen: _Choices, prefix: PrefixStates) -> None:
        token = prefix.latency_tokens[chosen.sample.name, chosen.tier][chosen.position].to("cpu", torch.float32)
        top_k_scores, block_scores = self._network.stage_two(token, chosen.taken[1], chosen.limit.relative_budget)
        options = self.executor.options
        blocks = options.block_totals[chosen.choose(block_scores)]
        chosen.knobs = Knobs(chosen.tier, chosen.position, options.top_ks[chosen.choose(top_k_scores)], blocks)

    def _now_ms(self) -> float:
        if self._accelerated:
            torch.accelerator.synchronize()
        return 1000 * self._clock()


@dataclass
class _Choices:
    """The decisions about one request, while they are taken."""

    sample: Sample
    limit: BudgetLimit
    text: EmbeddedText
    taken: list[int] = field(default_factory=list)
    """Indices of options, in the order decisions are taken."""
    tier: str = field(init=False)
    position: int = field(init=False)
    knobs: Knobs = field(init=False)

    def choose(self, scores: Sequence[float]) -> int:
        """The index of the best option that the limit allows."""
        best = max(self.limit.allowed(self.taken), key=scores.__getitem__)
        self.taken.append(best)
        return best

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple([self.taken[decision] for decision in DECISION_ORDER])


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
        bounds = PacedBounds(LeastBounds(bound_ms.view(executor.options.shape)))
        only = BudgetLimit(bounds, limit_ms=1.0, relative_budget=0.5)
        if new_tokens not in self._servers:
            self._servers[new_tokens] = ControllerServer(self._network, executor, max_new_tokens=new_tokens)
        return self._meter.time(lambda: self._servers[new_tokens].serve([(request.sample, only)]))
