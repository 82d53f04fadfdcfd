"""Estimated milliseconds of every configuration of a question, as tables. Training never looks at a clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.meter.latency import DECODE, PREFILL, VISION, Estimated
from groupwise.workloads.controller.budget import Span
from groupwise.workloads.controller.knobs import KnobOptions, Knobs, work_of_answer

Table = Float[Tensor, "tiers positions top_ks blocks"]
"""A number for every configuration, in the order of `KnobOptions.all()`."""


class LatencyEstimator(Protocol):
    """Anything that can say beforehand what an answer will take."""

    def estimate(self, prompt_tokens: Mapping[str, int], knobs: Sequence[Knobs]) -> Sequence[Estimated]:
        """For a question with prompts of this length (by tier), the time under each of these knobs."""
        ...


@dataclass(frozen=True)
class Costs:
    """Milliseconds of every configuration of one question."""

    median_ms: Table
    high_ms: Table
    """What an answer stays under with the estimator's high probability."""

    def promised_ms(self, *, guaranteed: bool) -> Table:
        """What is held against a budget: the high quantile where it is guaranteed, else the median."""
        return self.high_ms if guaranteed else self.median_ms


def table_shape(options: KnobOptions) -> tuple[int, int, int, int]:
    return len(options.crops), len(options.insertion_positions), len(options.top_ks), len(options.block_totals)


def costs(
    estimator: LatencyEstimator, options: KnobOptions, prompt_tokens: Mapping[str, int], span: Span = "answer"
) -> Costs:
    """Ask the estimator for all configurations at once; refuse what is no time."""
    found = estimator.estimate(prompt_tokens, list(options.all()))
    medians, highs = zip(*(_of_span(estimated, span) for estimated in found), strict=True)
    tables = [torch.tensor(column, dtype=torch.float64).view(table_shape(options)) for column in (medians, highs)]
    for table in tables:
        if not (table.isfinite() & (table > 0)).all():
            raise UserError(
                f"The latency estimator gives {table.min().item():g} to {table.max().item():g} ms for prompts of"
                f" {dict(prompt_tokens)} tokens: every estimate must be a finite time above 0. Fit it anew."
            )
    return Costs(*tables)


def _of_span(estimated: Estimated, span: Span) -> tuple[float, float]:
    """Median and high quantile of the whole answer, or of its way to the first token: without the median of decoding.

    That bounds the high quantile up to the first token from above: decoding adds its median and some spread of its own.
    """
    decode_ms = estimated.stages_ms.get(DECODE, 0.0) if span == "first_token" else 0.0
    return estimated.total_ms - decode_ms, estimated.high_ms - decode_ms


@dataclass(frozen=True)
class CountedWork:
    """Time in proportion to counted work: a stand-in where no estimator has been fitted, and honest only in ratios."""

    options: KnobOptions
    crop_ms: float = 0.4
    block_ms: float = 0.25
    pair_ms: float = 0.0004
    decode_ms: float = 0.0
    """Of all decode steps together."""
    spread: float = 0.05
    """How far the high quantile lies above the median, as a share of it."""

    def estimate(self, prompt_tokens: Mapping[str, int], knobs: Sequence[Knobs]) -> list[Estimated]:
        return [self._estimate(prompt_tokens[each.tier], each) for each in knobs]

    def _estimate(self, tokens: int, knobs: Knobs) -> Estimated:
        work = work_of_answer(self.options, knobs, tokens)
        stages = {
            VISION: self.crop_ms * work.crops,
            PREFILL: self.block_ms * work.block_rows + self.pair_ms * work.expert_pairs,
            DECODE: self.decode_ms,
        }
        total = sum(stages.values())
        return Estimated(stages, total, total * (1 + self.spread), 0.95)
