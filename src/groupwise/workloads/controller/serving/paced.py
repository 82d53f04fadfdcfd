"""PacedEstimates: estimated latencies of a call at the machine's present pace, with opening and cutting its images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from groupwise.latency.pace import BatchPaces, Pace
from groupwise.latency.records import DECODE, IMAGE, QUEUE, EstimatedLatency, Timing
from groupwise.workloads.controller.latency.estimates import (
    LatencyTableCache,
    ProportionalEstimator,
    within_scope,
)
from groupwise.workloads.controller.model.adapters import Sample
from groupwise.workloads.controller.model.images import LazyCrops
from groupwise.workloads.controller.model.knobs import Knobs
from groupwise.workloads.controller.serving.files import ControllerSettings
from groupwise.workloads.controller.serving.limits import LeastBounds, PacedBounds
from groupwise.workloads.controller.task import Question

_CUT_MS_PER_MEGAPIXEL = 5.0
"""Before any image was cut."""
_CUT_QUANTILE = 0.95


@dataclass(frozen=True)
class Spent:
    """What a call has spent before its knobs are chosen."""

    image_ms: Sequence[float]
    """On opening the image of each request."""
    queue_ms: float
    """On waiting for other calls."""

    @property
    def total_ms(self) -> float:
        return sum(self.image_ms) + self.queue_ms


@dataclass(frozen=True)
class CallEstimate:
    """A call with its chosen knobs. All its answers are there when it ends."""

    latency: EstimatedLatency
    """From the arrival of its requests, at the present pace."""
    bound_ms: float
    """The same in terms of budgets: of their scope, the upper quantile where they are hard, else the median."""
    pace: Pace
    fitted_median_ms: float
    """Of the model alone, in the scope of budgets, at the pace that the estimator was fitted at."""
    fitted_upper_ms: float
    cutting_ms: float
    """At the pace before any image was cut."""
    batch_size: int


class PacedEstimates:
    """The latency estimates of a controller, corrected by what its answers took lately."""

    def __init__(self, settings: ControllerSettings):
        self._estimator, self._options, self._budget = settings.estimator, settings.options, settings.budget
        self._cache = LatencyTableCache(settings.estimator, settings.options, settings.budget.scope)
        self._least: dict[tuple[int, ...], LeastBounds] = {}
        self._paces, self._cutting = BatchPaces(), Pace()

    @property
    def pace(self) -> Pace:
        """Of single answers."""
        return self._paces.of(1)

    @property
    def are_milliseconds(self) -> bool:
        """False where the estimator knows proportions only."""
        return not isinstance(self._estimator, ProportionalEstimator)

    def fitted_bounds(self, question: Question) -> PacedBounds:
        """What is compared with a budget, at the pace that the estimator was fitted at."""
        return PacedBounds(self._least_bounds(question))

    def bounds(self, question: Question) -> PacedBounds:
        """The same for one request alone at the present pace, with cutting its image."""
        factor = self._factor(self._cutting)
        cutting_ms = [factor * _cutting_ms(question.sample, tier) for tier in self._options.crops_by_tier]
        return PacedBounds(self._least_bounds(question), self._factor(self.pace), cutting_ms)

    def _least_bounds(self, question: Question) -> LeastBounds:
        lengths = tuple([question.prompt_tokens[tier] for tier in self._options.crops_by_tier])
        if lengths not in self._least:
            tables = self._cache.tables(question.prompt_tokens)
            self._least[lengths] = LeastBounds(tables.bound_ms(is_hard=self._budget.is_hard))
        return self._least[lengths]

    def of_call(self, questions: Sequence[Question], knobs: Sequence[Knobs], spent: Spent) -> CallEstimate:
        pace, asked = self._paces.of(len(questions)), list(zip(questions, knobs, strict=True))
        cutting_ms = sum(_cutting_ms(question.sample, chosen.tier) for question, chosen in asked)
        alone = [self._estimator.estimate(question.prompt_tokens, [chosen])[0] for question, chosen in asked]
        median_ms, upper_ms = (
            sum(column) for column in zip(*(within_scope(each, self._budget.scope) for each in alone), strict=True)
        )
        image_ms = sum(spent.image_ms) + self._cutting.slowdown * cutting_ms
        latency = EstimatedLatency(
            stages_ms={
                QUEUE: spent.queue_ms,
                IMAGE: image_ms,
                **{stage: pace.slowdown * sum(each.stages_ms[stage] for each in alone) for stage in alone[0].stages_ms},
            },
            total_ms=spent.queue_ms + image_ms + pace.slowdown * sum(each.total_ms for each in alone),
            upper_ms=spent.total_ms
            + self._cutting.upper_ratio * cutting_ms
            + pace.upper_ratio * sum(each.upper_ms for each in alone),
            quantile=alone[0].quantile,
        )
        fitted_bound_ms = upper_ms if self._budget.is_hard else median_ms
        bound_ms = spent.total_ms + self._factor(self._cutting) * cutting_ms + self._factor(pace) * fitted_bound_ms
        return CallEstimate(latency, bound_ms, pace, median_ms, upper_ms, cutting_ms, len(questions))

    def follow(self, estimated: CallEstimate, measured: Timing, cut_ms: float) -> None:
        """Adjust the pace to a call: to the time of its model, and to the part of its image's time that was cutting."""
        others_ms = measured.stages_ms[QUEUE] + measured.stages_ms[IMAGE]
        if self._budget.scope == "first_token":
            others_ms += measured.stages_ms[DECODE]
        model_ms = measured.total_ms - others_ms
        if model_ms > 0:
            after = self._paces.of(estimated.batch_size).after(
                model_ms,
                median_ms=estimated.fitted_median_ms,
                upper_ms=estimated.fitted_upper_ms,
                quantile=estimated.latency.quantile,
            )
            self._paces.set(estimated.batch_size, after)
        if cut_ms > 0 and estimated.cutting_ms > 0:
            self._cutting = self._cutting.after(
                cut_ms, median_ms=estimated.cutting_ms, upper_ms=estimated.cutting_ms, quantile=_CUT_QUANTILE
            )

    def _factor(self, pace: Pace) -> float:
        return pace.upper_ratio if self._budget.is_hard else pace.slowdown


def cut_ms(samples: Sequence[Sample]) -> float:
    """Time spent so far on cutting the images of samples."""
    images = {id(sample.crops_by_tier): sample.crops_by_tier for sample in samples}
    return sum(crops.cut_ms for crops in images.values() if isinstance(crops, LazyCrops))


def _cutting_ms(sample: Sample, tier: str) -> float:
    crops = sample.crops_by_tier
    return _CUT_MS_PER_MEGAPIXEL * crops.work(tier) if isinstance(crops, LazyCrops) else 0.0
