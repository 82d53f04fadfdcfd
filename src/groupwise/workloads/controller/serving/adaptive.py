"""AdaptiveModel: a model with its trained controller, which chooses the knobs of every answer by its budget."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Self

import numpy as np
import torch
from torch import Tensor

from groupwise.core.errors import UserError, require
from groupwise.dist.process import keep_heap_memory
from groupwise.latency.meter import LatencyMeter, find_model_parts
from groupwise.latency.pace import Pace
from groupwise.latency.records import IMAGE, PREFILL, QUEUE, EstimatedLatency, Timing
from groupwise.workloads.controller.config import Budget, infeasible_budget_error
from groupwise.workloads.controller.latency.estimates import KnobLatencyEstimator, KnobLatencyModel
from groupwise.workloads.controller.latency.source import estimator_problem, profile_samples, recalibrate
from groupwise.workloads.controller.model.executor import Executor
from groupwise.workloads.controller.model.images import ImageInput, check_image, read_image
from groupwise.workloads.controller.model.inputs import TransformersFrontEnd, prompt_length
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
from groupwise.workloads.controller.serving.limits import BudgetLimit, budget_limit
from groupwise.workloads.controller.serving.paced import PacedEstimates, Spent, cut_ms
from groupwise.workloads.controller.serving.server import ControllerServer, ServedAnswer, ServedTimer
from groupwise.workloads.controller.task import Question

QUESTION = "{question}"
_MIN_BUDGET_MS = 1e-9
_BUDGET_STEPS = 1024
GenerateRequest = tuple[ImageInput, str, float]
"""An image, a question, and a budget in milliseconds."""


@dataclass(frozen=True)
class Reply:
    answer: str
    knobs: Knobs
    """The controller's choice."""
    budget_ms: float
    estimated: EstimatedLatency
    """From the request's arrival, at the machine's present pace: waiting and opening the image as measured, the rest
    as estimated before it ran. In a batch: of the whole batch, since all of its answers are there when it ends."""
    measured: Timing
    """The same, measured."""
    within_budget: bool | None
    """Whether the estimate is within the budget: its upper quantile under hard enforcement, else its median. False
    where no knobs are fast enough now, where the rest of the batch takes too long, and where the controller exceeds a
    soft budget by choice. None where the estimator knows proportions but no milliseconds."""
    pace: Pace
    """How fast the machine was when this was estimated."""
    batch_size: int = 1
    """How many requests were answered in the same batch."""


class AdaptiveModel:
    """Load one with `load` or `from_pretrained`. Calls from several threads are answered one after the other."""

    def __init__(
        self,
        loaded: LoadedModel,
        settings: ControllerSettings,
        policy: ControllerNetwork,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        keep_heap_memory()  # as in the process that the estimator was fitted in
        self.loaded, self.settings = replace(loaded, options=settings.options), settings
        self.policy = policy.to(loaded.model.device)
        self._executor = Executor(loaded.adapter, settings.options)
        self._server = ControllerServer(
            self.policy, self._executor, max_new_tokens=settings.max_new_tokens, stop_token=settings.stop_token
        )
        self._clock, self._meter = clock, LatencyMeter(find_model_parts(loaded.model), clock=clock)
        self._estimates, self._turn = PacedEstimates(settings), Lock()

    @classmethod
    def load(
        cls,
        run: Path | str,
        *,
        model: LoadedModel | Path | str | None = None,
        estimator: KnobLatencyModel | None = None,
        allow_estimator_mismatch: bool = False,
    ) -> Self:
        """The newest valid checkpoint of a run, with its EMA weights if the run kept them.

        Its latency estimator is checked with some answers, measured now.
        """
        folder, weights = find_checkpoint(Path(run))
        return cls._load(folder, weights, model, estimator, allow_mismatch=allow_estimator_mismatch)

    @classmethod
    def from_pretrained(
        cls,
        folder: Path | str,
        *,
        model: LoadedModel | Path | str | None = None,
        estimator: KnobLatencyModel | None = None,
        allow_estimator_mismatch: bool = False,
    ) -> Self:
        """A folder of `save_pretrained`. The frozen model is loaded by its name unless it is given.

        Its latency estimator is checked with some answers, measured now.
        """
        weights = Path(folder) / PRETRAINED_WEIGHTS
        return cls._load(Path(folder), weights, model, estimator, allow_mismatch=allow_estimator_mismatch)

    @classmethod
    def _load(
        cls,
        folder: Path,
        weights: Path,
        model: LoadedModel | Path | str | None,
        estimator: KnobLatencyModel | None,
        *,
        allow_mismatch: bool,
    ) -> Self:
        loaded = cls(*load_controller(folder, weights, model, estimator, allow_mismatch=allow_mismatch))
        known = loaded.settings.estimator
        if estimator is None and isinstance(known, KnobLatencyEstimator):
            problem = estimator_problem(known, loaded.loaded, timer_for=ServedTimer)
            if problem:
                warnings.warn(
                    f"The latency profile in {folder} {problem}. Estimates follow the answers that are measured; call"
                    " recalibrate() to measure 100 of them first.",
                    stacklevel=3,
                )
        return loaded

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
        with self._turn:
            estimator, slowdown = recalibrate(
                known, self._executor, profile_samples(self.loaded), timer=ServedTimer(self._executor), answers=answers
            )
            self.settings = replace(self.settings, estimator=estimator)
            self._estimates = PacedEstimates(self.settings)
        return slowdown

    @property
    def pace(self) -> Pace:
        """How fast the machine answers at present, in terms of the estimator; followed from the model's own answers."""
        return self._estimates.pace

    def estimate(self, image: ImageInput, question: str, knobs: Knobs | None = None) -> EstimatedLatency:
        """The latency that a request would have now with these knobs, or with the full ones: a scale for budgets."""
        (asked,), (image_ms,) = self._open([(image, question)])
        chosen = knobs or self.settings.options.full
        self.settings.options.check(chosen)
        return self._estimates.of_call([asked], [chosen], Spent([image_ms], 0.0)).latency

    def generate(self, image: ImageInput, question: str, budget_ms: float, *, best_effort: bool = False) -> Reply:
        """Answer within the budget, which starts now: opening the image counts.

        A budget that no configuration fits, neither at the present pace nor at the one the estimator was fitted at, is
        refused, or served by the cheapest one as a best effort. One that is too small only now is served in the same
        way, and the reply says so.
        """
        return self.generate_batch([(image, question, budget_ms)], best_effort=best_effort)[0]

    def generate_batch(self, requests: Sequence[GenerateRequest], *, best_effort: bool = False) -> list[Reply]:
        """Answer any mix of (image, question, budget_ms) in one batch; knobs and answers are those of each alone."""
        arrived_ms = self._now_ms()
        for request in requests:
            if not isinstance(request, tuple) or len(request) != 3:
                raise UserError(f"A request is {request!r}: it must be a tuple (image, question, budget_ms).")
        budgets_ms = [budget_ms for _, _, budget_ms in requests]
        _check_budgets(budgets_ms, best_effort=best_effort)
        questions, image_ms = self._open([(image, text) for image, text, _ in requests])
        return self._reply(questions, budgets_ms, image_ms, arrived_ms, best_effort=best_effort)

    def reply(
        self, questions: Sequence[Question], budgets_ms: Sequence[float], *, best_effort: bool = False
    ) -> list[Reply]:
        """The same for questions that are ready for the model."""
        arrived_ms = self._now_ms()
        _check_budgets(budgets_ms, best_effort=best_effort)
        return self._reply(questions, budgets_ms, [0.0] * len(questions), arrived_ms, best_effort=best_effort)

    def _open(self, asked: Sequence[tuple[ImageInput, str]]) -> tuple[list[Question], list[float]]:
        """The questions, and the time that opening each image took."""
        questions, image_ms = [], []
        for image, text in asked:
            started_ms = self._now_ms()
            questions.append(make_question(image, text, self.loaded, prompt=self.settings.source.prompt))
            image_ms.append(self._now_ms() - started_ms)
        return questions, image_ms

    @torch.inference_mode()
    def _reply(
        self,
        questions: Sequence[Question],
        budgets_ms: Sequence[float],
        image_ms: Sequence[float],
        arrived_ms: float,
        *,
        best_effort: bool,
    ) -> list[Reply]:
        if not questions:
            return []
        samples = [question.sample for question in questions]
        with self._turn:
            spent = Spent(image_ms, max(0.0, self._now_ms() - arrived_ms - sum(image_ms)))
            cut_before_ms, served = cut_ms(samples), list[ServedAnswer]()
            timing = self._meter.time(
                lambda: served.extend(self._serve(questions, budgets_ms, spent, best_effort=best_effort))
            )
            cutting_ms = min(cut_ms(samples) - cut_before_ms, timing.stages_ms[PREFILL])
            estimated = self._estimates.of_call(questions, [answer.knobs for answer in served], spent)
            measured = _with_image(timing, spent, cutting_ms)
            self._estimates.follow(estimated, measured, cutting_ms)
        is_known = self._estimates.are_milliseconds
        return [
            Reply(
                answer=self.loaded.front_end.decode(answer.tokens),
                knobs=answer.knobs,
                budget_ms=float(budget_ms),
                estimated=estimated.latency,
                measured=measured,
                within_budget=estimated.bound_ms <= budget_ms if is_known else None,
                pace=estimated.pace,
                batch_size=len(questions),
            )
            for budget_ms, answer in zip(budgets_ms, served, strict=True)
        ]

    def _serve(
        self, questions: Sequence[Question], budgets_ms: Sequence[float], spent: Spent, *, best_effort: bool
    ) -> list[ServedAnswer]:
        requests = []
        for question, budget_ms, image_ms in zip(questions, budgets_ms, spent.image_ms, strict=True):
            if not best_effort and self._estimates.are_milliseconds:
                self._check_feasible(question, budget_ms)
            left_ms = max(budget_ms - image_ms - spent.queue_ms, _MIN_BUDGET_MS)
            requests.append((question.sample, self._limit(question, left_ms)))
        return self._server.serve(requests)

    def _check_feasible(self, question: Question, budget_ms: float) -> None:
        bounds = min(
            self._estimates.fitted_bounds(question), self._estimates.bounds(question), key=lambda at: at.cheapest_ms
        )
        if bounds.cheapest_ms > budget_ms:
            raise infeasible_budget_error(
                Budget(budget_ms, "ms", self.settings.budget.scope),
                budget_ms,
                bounds.cheapest_ms,
                bounds.full_ms,
                remedy="best_effort=True",
            )

    def _limit(self, question: Question, left_ms: float) -> BudgetLimit:
        """The time that is left, at the present pace."""
        bounds = self._estimates.bounds(question)
        relative_budget = self._trained_budget(bounds.relative_budget(left_ms))
        return budget_limit(bounds, left_ms, relative_budget, is_hard=self.settings.budget.is_hard)

    def _trained_budget(self, relative_budget: float) -> float:
        """The nearest budget that the network was trained on: beyond the largest one, what it learned for that one is
        better than extrapolation. A smaller soft budget is given as it is, since only the network keeps it; a hard one
        is kept by its limit. In steps, since the server keeps what it computes for a budget.
        """
        smallest, largest = self.settings.trained_budget_range
        budget = round(relative_budget * _BUDGET_STEPS) / _BUDGET_STEPS
        return min(max(budget, smallest) if self.settings.budget.is_hard else budget, largest)

    def _now_ms(self) -> float:
        return 1000 * self._clock()


def _with_image(timing: Timing, spent: Spent, cutting_ms: float) -> Timing:
    """Since the arrival. Cutting happens just before the vision tower runs, so the meter counts it as prefill."""
    stages_ms = {
        QUEUE: spent.queue_ms,
        IMAGE: sum(spent.image_ms) + cutting_ms,
        **timing.stages_ms,
        PREFILL: timing.stages_ms[PREFILL] - cutting_ms,
    }
    return Timing(stages_ms, spent.total_ms + timing.total_ms, timing.decode_steps_ms)


def make_question(image: ImageInput, text: str, loaded: LoadedModel, *, prompt: str = QUESTION) -> Question:
    """A question without a known answer."""
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"The question is {text!r}: ask something about the image, in words.")
    given = image if isinstance(loaded.front_end, TransformersFrontEnd) else _path_image_or_pixels(image)
    sample = loaded.front_end.sample(given, prompt.replace(QUESTION, text))
    lengths = {tier: prompt_length(loaded.adapter, sample, tier) for tier in loaded.options.crops_by_tier}
    return Question(sample, text, (), lengths, image=str(image) if isinstance(image, Path | str) else "")


def _path_image_or_pixels(image: ImageInput) -> ImageInput:
    """What the front ends of tasks take; they check pixels themselves."""
    if isinstance(image, Tensor | np.ndarray):
        return image
    checked = check_image(image)
    return read_image(checked) if isinstance(checked, BytesIO) else checked


def _check_budgets(budgets_ms: Sequence[float], *, best_effort: bool) -> None:
    for budget_ms in budgets_ms:
        is_number = isinstance(budget_ms, int | float) and not isinstance(budget_ms, bool) and math.isfinite(budget_ms)
        require(
            is_number and (best_effort or budget_ms > 0),
            "budget_ms",
            budget_ms,
            "a finite number above 0, in milliseconds",
        )
