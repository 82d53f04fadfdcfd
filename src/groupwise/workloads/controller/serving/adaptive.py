"""AdaptiveModel: a model with its trained controller, which chooses the knobs of every answer by its budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from groupwise.core.errors import UserError, require
from groupwise.dist.process import keep_heap_memory
from groupwise.latency.meter import LatencyMeter, find_model_parts
from groupwise.latency.records import EstimatedLatency, Timing
from groupwise.workloads.controller.conditions import full_configuration, relative_budgets
from groupwise.workloads.controller.config import Budget, infeasible_budget_error
from groupwise.workloads.controller.latency.estimates import (
    KnobLatencyEstimator,
    KnobLatencyModel,
    KnobTable,
    LatencyTableCache,
)
from groupwise.workloads.controller.latency.source import profile_samples, recalibrate
from groupwise.workloads.controller.model.executor import Executor
from groupwise.workloads.controller.model.inputs import ImageInput, prompt_length
from groupwise.workloads.controller.model.knobs import Knobs
from groupwise.workloads.controller.model.load import LoadedModel
from groupwise.workloads.controller.policy.network import ControllerNetwork
from groupwise.workloads.controller.serving.files import (
    PRETRAINED_WEIGHTS,
    ControllerSettings,
    find_checkpoint,
    load_controller,
    save_controller,
)
from groupwise.workloads.controller.serving.server import (
    BudgetLimit,
    ControllerServer,
    ServedAnswer,
    ServedTimer,
    budget_limit,
)
from groupwise.workloads.controller.task import Question

QUESTION = "{question}"
_MIN_BUDGET_MS = 1e-9
GenerateRequest = tuple[ImageInput, str, float]
"""An image, a question, and a budget in milliseconds."""


@dataclass(frozen=True)
class Reply:
    answer: str
    knobs: Knobs
    """The controller's choice."""
    budget_ms: float
    estimated: EstimatedLatency
    """The estimated latency of these knobs, for this request alone."""
    measured: Timing
    """From pixels and tokens to the last token, the controller's decisions included. In a batch: of the whole batch,
    since all of its answers are there when it ends."""
    within_budget: bool
    """Whether the estimate is within the budget: its upper quantile under hard enforcement, else its median. False only
    after a best effort, or where the controller may exceed a soft budget by choice."""
    batch_size: int = 1
    """How many requests were answered in the same batch."""


class AdaptiveModel:
    """Load one with `load` or `from_pretrained`."""

    def __init__(self, loaded: LoadedModel, settings: ControllerSettings, policy: ControllerNetwork):
        keep_heap_memory()  # as in the process that the estimator was fitted in
        self.loaded, self.settings = replace(loaded, options=settings.options), settings
        self.policy = policy.to(loaded.model.device)
        self._executor = Executor(loaded.adapter, settings.options)
        self._server = ControllerServer(
            self.policy, self._executor, max_new_tokens=settings.max_new_tokens, stop_token=settings.stop_token
        )
        self._meter = LatencyMeter(find_model_parts(loaded.model))
        self._latency = self._latency_cache()

    @classmethod
    def load(
        cls,
        run: Path | str,
        *,
        model: LoadedModel | Path | str | None = None,
        estimator: KnobLatencyModel | None = None,
        allow_estimator_mismatch: bool = False,
    ) -> Self:
        """The newest valid checkpoint of a run, with its EMA weights if the run kept them."""
        folder, weights = find_checkpoint(Path(run))
        return cls(*load_controller(folder, weights, model, estimator, allow_mismatch=allow_estimator_mismatch))

    @classmethod
    def from_pretrained(
        cls,
        folder: Path | str,
        *,
        model: LoadedModel | Path | str | None = None,
        estimator: KnobLatencyModel | None = None,
        allow_estimator_mismatch: bool = False,
    ) -> Self:
        """A folder of `save_pretrained`. The frozen model is loaded by its name unless it is given."""
        weights = Path(folder) / PRETRAINED_WEIGHTS
        return cls(*load_controller(Path(folder), weights, model, estimator, allow_mismatch=allow_estimator_mismatch))

    def save_pretrained(self, folder: Path | str) -> None:
        """Write config.json, model.safetensors and, for a fitted estimator, estimator.json."""
        save_controller(Path(folder), self.settings, self.policy)

    def recalibrate(self, answers: int = 100) -> float:
        """Time so many answers, so that budgets are kept at this machine's current speed.

        Returns the slowdown: measured over estimated latency.
        """
        known = self.settings.estimator
        if not isinstance(known, KnobLatencyEstimator):
            raise UserError(
                f"This controller's latency estimates come from {type(known).__name__}, which was not measured: there"
                " is nothing to recalibrate. Load it with estimator=KnobLatencyEstimator(...), fitted by `groupwise"
                " profile`."
            )
        estimator, slowdown = recalibrate(
            known, self._executor, profile_samples(self.loaded), timer=ServedTimer(self._executor), answers=answers
        )
        self.settings = replace(self.settings, estimator=estimator)
        self._latency = self._latency_cache()
        return slowdown

    def generate(self, image: ImageInput, question: str, budget_ms: float, *, best_effort: bool = False) -> Reply:
        """Answer within the budget. One that no configuration fits is refused, or served by the cheapest one as a best
        effort.
        """
        return self.generate_batch([(image, question, budget_ms)], best_effort=best_effort)[0]

    def generate_batch(self, requests: Sequence[GenerateRequest], *, best_effort: bool = False) -> list[Reply]:
        """Answer any mix of (image, question, budget_ms) in one batch; knobs and answers are those of each alone."""
        for request in requests:
            if not isinstance(request, tuple) or len(request) != 3:
                raise UserError(f"A request is {request!r}: it must be a tuple (image, question, budget_ms).")
        prompt = self.settings.source.prompt
        questions = [make_question(image, text, self.loaded, prompt=prompt) for image, text, _ in requests]
        return self.reply(questions, [budget_ms for _, _, budget_ms in requests], best_effort=best_effort)

    @torch.inference_mode()
    def reply(
        self, questions: Sequence[Question], budgets_ms: Sequence[float], *, best_effort: bool = False
    ) -> list[Reply]:
        """The same for questions that are ready for the model."""
        if not questions:
            return []
        for budget_ms in budgets_ms:
            _check_budget(budget_ms, best_effort=best_effort)
        served: list[tuple[Sequence[BudgetLimit], Sequence[ServedAnswer]]] = []
        measured = self._meter.time(lambda: served.append(self._serve(questions, budgets_ms, best_effort)))
        return [
            Reply(
                answer=self.loaded.front_end.decode(answer.tokens),
                knobs=answer.knobs,
                budget_ms=float(budget_ms),
                estimated=self.settings.estimator.estimate(question.prompt_tokens, [answer.knobs])[0],
                measured=measured,
                within_budget=bool(limit.bound_ms[answer.choices] <= budget_ms),
                batch_size=len(questions),
            )
            for question, budget_ms, limit, answer in zip(questions, budgets_ms, *served[0], strict=True)
        ]

    def _serve(
        self, questions: Sequence[Question], budgets_ms: Sequence[float], best_effort: bool
    ) -> tuple[Sequence[BudgetLimit], Sequence[ServedAnswer]]:
        limits = [
            self._limit(question, max(float(budget_ms), _MIN_BUDGET_MS), best_effort=best_effort)
            for question, budget_ms in zip(questions, budgets_ms, strict=True)
        ]
        samples = [question.sample for question in questions]
        return limits, self._server.serve(list(zip(samples, limits, strict=True)))

    def _limit(self, question: Question, budget_ms: float, *, best_effort: bool) -> BudgetLimit:
        is_hard, scope = self.settings.budget.guaranteed, self.settings.budget.span
        bound_ms = self._latency.tables(question.prompt_tokens).bound_ms(is_hard=is_hard)
        if not best_effort and not (bound_ms <= budget_ms).any():
            raise infeasible_budget_error(
                Budget(budget_ms, "ms", scope),
                budget_ms,
                float(bound_ms.min()),
                full_configuration(bound_ms).item(),
                how="best_effort=True",
            )
        return budget_limit(bound_ms, budget_ms, self._relative_budget(bound_ms, budget_ms), is_hard=is_hard)

    def _relative_budget(self, bound_ms: KnobTable, budget_ms: float) -> float:
        """The nearest budget that the network was trained on: beyond the largest one, what it learned for that one is
        better than extrapolation. A smaller soft budget is given as it is, since only the network keeps it; a hard one
        is kept by its limit.
        """
        budget = relative_budgets(bound_ms[None], torch.tensor([[budget_ms]], dtype=torch.float64)).item()
        smallest, largest = self.settings.trained_budget_range
        return min(max(budget, smallest) if self.settings.budget.guaranteed else budget, largest)

    def _latency_cache(self) -> LatencyTableCache:
        return LatencyTableCache(self.settings.estimator, self.settings.options, self.settings.budget.span)


def make_question(image: ImageInput, text: str, loaded: LoadedModel, *, prompt: str = QUESTION) -> Question:
    """A question without a known answer."""
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"The question is {text!r}: ask something about the image, in words.")
    sample = loaded.front_end.sample(image, prompt.replace(QUESTION, text))
    lengths = {tier: prompt_length(loaded.adapter, sample, tier) for tier in loaded.options.crops_by_tier}
    return Question(sample, text, (), lengths, image=str(image) if isinstance(image, Path | str) else "")


def _check_budget(budget_ms: float, *, best_effort: bool) -> None:
    is_number = isinstance(budget_ms, int | float) and not isinstance(budget_ms, bool) and math.isfinite(budget_ms)
    require(
        is_number and (best_effort or budget_ms > 0),
        "budget_ms",
        budget_ms,
        "a finite number above 0, in milliseconds",
    )
