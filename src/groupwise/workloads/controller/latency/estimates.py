"""Estimated latency of every configuration of a model's knobs, as tables by prompt length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.core.errors import UserError, require
from groupwise.core.groups import content_hash
from groupwise.latency.estimator import EstimatedRows, LatencyEstimator
from groupwise.latency.records import DECODE, PREFILL, VISION, EstimatedLatency
from groupwise.latency.regression import Columns, WorkFeatures
from groupwise.workloads.controller.config import BudgetScope
from groupwise.workloads.controller.model.knobs import KnobOptions, Knobs, work_of_answer
from groupwise.workloads.hub import stable_config

KnobTable = Float[Tensor, "tiers positions top_ks blocks"]
"""A number for every configuration, in the order of `KnobOptions.configurations()`."""
FEATURE_VERSION = 3
"""Goes up when the executor does or counts other work for the same configuration, which makes estimators outdated."""
_Column = Float[np.ndarray, " rows"]


class KnobLatencyModel(Protocol):
    """Estimates the latency of an answer before it runs."""

    def estimate(self, prompt_tokens: Mapping[str, int], knobs: Sequence[Knobs]) -> Sequence[EstimatedLatency]:
        """The latency with each of these knobs, for a question with prompts of these lengths by tier."""
        ...


@dataclass(frozen=True)
class LatencyTables:
    """Milliseconds of every configuration for one question."""

    median_ms: KnobTable
    upper_ms: KnobTable
    """An answer stays below this with the estimator's probability."""

    def bound_ms(self, *, is_hard: bool) -> KnobTable:
        """What is compared with a budget: the upper quantile where it is hard, else the median."""
        return self.upper_ms if is_hard else self.median_ms


class LatencyTableCache:
    """Latency tables of one model. They depend on the prompt's length alone, so each is computed once."""

    def __init__(self, estimator: KnobLatencyModel, options: KnobOptions, scope: BudgetScope):
        self._estimator, self._options, self._scope = estimator, options, scope
        self._configurations = list(options.configurations())
        self._tables: dict[tuple[int, ...], LatencyTables] = {}

    def tables(self, prompt_tokens: Mapping[str, int]) -> LatencyTables:
        """For a question with prompts of these lengths by tier; estimates that are no times are refused."""
        lengths = tuple(prompt_tokens[tier] for tier in self._options.crops_by_tier)
        if lengths not in self._tables:
            self._tables[lengths] = self._compute(prompt_tokens)
        return self._tables[lengths]

    def _compute(self, prompt_tokens: Mapping[str, int]) -> LatencyTables:
        estimates = self._estimator.estimate(prompt_tokens, self._configurations)
        columns = zip(*(within_scope(estimated, self._scope) for estimated in estimates), strict=True)
        tables = [torch.tensor(column, dtype=torch.float64).view(self._options.shape) for column in columns]
        for table in tables:
            if not (table.isfinite() & (table > 0)).all():
                raise UserError(
                    f"The latency estimator gives {table.min().item():g} to {table.max().item():g} ms for prompts of"
                    f" {dict(prompt_tokens)} tokens: every estimate must be a finite time above 0. Fit it again."
                )
        return LatencyTables(*tables)


def within_scope(estimated: EstimatedLatency, scope: BudgetScope) -> tuple[float, float]:
    """Median and upper quantile of the whole answer, or of the time to its first token: without the median of decoding.

    The latter bounds the upper quantile to the first token from above, since decoding adds its median and a spread.
    """
    decode_ms = estimated.stages_ms.get(DECODE, 0.0) if scope == "first_token" else 0.0
    return estimated.total_ms - decode_ms, estimated.upper_ms - decode_ms


@dataclass(frozen=True)
class ProportionalEstimator:
    """Latency in proportion to counted work, for where no estimator has been fitted: right in ratios only."""

    options: KnobOptions
    crop_ms: float = 0.4
    block_ms: float = 0.25
    pair_ms: float = 0.0004
    decode_ms: float = 0.0
    """Of all decode steps together."""
    spread: float = 0.05
    """How far the upper quantile is above the median, as a fraction of it."""

    def estimate(self, prompt_tokens: Mapping[str, int], knobs: Sequence[Knobs]) -> list[EstimatedLatency]:
        return [self._estimate(prompt_tokens[setting.tier], setting) for setting in knobs]

    def _estimate(self, tokens: int, knobs: Knobs) -> EstimatedLatency:
        work = work_of_answer(self.options, knobs, tokens)
        stages = {
            VISION: self.crop_ms * work.crops,
            PREFILL: self.block_ms * work.block_rows + self.pair_ms * work.expert_pairs,
            DECODE: self.decode_ms,
        }
        total = sum(stages.values())
        return EstimatedLatency(stages, total, total * (1 + self.spread), 0.95)


class KnobFeatures:
    """The counted work of every configuration of a model, for prompts of any length."""

    def __init__(self, options: KnobOptions):
        self.configurations = list(options.configurations())
        of_one, of_two = (
            [work_of_answer(options, knobs, tokens) for knobs in self.configurations] for tokens in (1, 2)
        )
        self._row = {knobs: row for row, knobs in enumerate(self.configurations)}
        self._crops = np.array([work.crops for work in of_one], float)
        self._blocks = np.array([work.block_rows for work in of_one], float)
        self._last_token_pairs = np.array([work.expert_pairs for work in of_one], float)
        self._other_token_pairs = np.array([work.expert_pairs for work in of_two], float) - self._last_token_pairs
        self._check = options.check

    def columns(self, prompt_tokens: Mapping[str, int], knobs: Sequence[Knobs], *, new_tokens: int = 1) -> Columns:
        """The features of an answer with each of the knobs, for prompts of these lengths by tier.

        n tokens take n - 1 decode steps; step i attends to the prompt and to the i tokens before.
        """
        require(new_tokens >= 1, "new_tokens", new_tokens, "1 or more")
        for setting in knobs:
            if setting not in self._row:
                self._check(setting)
        rows, steps = np.array([self._row[setting] for setting in knobs]), new_tokens - 1
        tokens: _Column = np.array([prompt_tokens[setting.tier] for setting in knobs], float)
        blocks, last_token_pairs = self._blocks[rows], self._last_token_pairs[rows]
        return {
            VISION: {"crops": self._crops[rows], "tokens": tokens},
            PREFILL: {
                "tokens": tokens,
                "blocks": blocks,
                "block_tokens": blocks * tokens,
                "attended": blocks * tokens**2,
                "expert_pairs": self._other_token_pairs[rows] * (tokens - 1) + last_token_pairs,
            },
            DECODE: {
                "steps": np.full_like(tokens, steps),
                "blocks": steps * blocks,
                "attended": blocks * (steps * tokens + steps * (steps + 1) / 2),
                "expert_pairs": steps * last_token_pairs,
            },
        }

    def features(self, knobs: Knobs, *, prompt_tokens: int, new_tokens: int = 1) -> WorkFeatures:
        """Of one answer."""
        columns = self.columns({knobs.tier: prompt_tokens}, [knobs], new_tokens=new_tokens)
        return {stage: {name: float(column[0]) for name, column in part.items()} for stage, part in columns.items()}


class KnobLatencyEstimator:
    """A fitted LatencyEstimator, asked by knobs, for answers of `new_tokens` tokens."""

    def __init__(self, estimator: LatencyEstimator, options: KnobOptions, *, new_tokens: int = 1):
        self.estimator, self.new_tokens, self._features = estimator, new_tokens, KnobFeatures(options)

    def rows(self, prompt_tokens: Mapping[str, int], knobs: Sequence[Knobs] | None = None) -> EstimatedRows:
        """The latency with each of the knobs (all configurations if None), for prompts of these lengths by tier."""
        knobs = self._features.configurations if knobs is None else knobs
        return self.estimator.predict_rows(self._features.columns(prompt_tokens, knobs, new_tokens=self.new_tokens))

    def estimate(self, prompt_tokens: Mapping[str, int], knobs: Sequence[Knobs]) -> list[EstimatedLatency]:
        """The same as records."""
        rows = self.rows(prompt_tokens, knobs)
        return [rows[index] for index in range(len(rows))]


def architecture_fingerprint(model: Any) -> str:
    """What a model's latency depends on: its class, dtype, configuration and how it is run; not its weights."""
    digest = content_hash(f"{FEATURE_VERSION} {stable_config(model, ignore=('architectures',))}", digest_size=8)
    return f"{type(model).__name__} {str(model.dtype).removeprefix('torch.')} {digest}"
