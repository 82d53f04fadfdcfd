"""Estimated milliseconds of every configuration of a question, as tables. Training never looks at a clock.
What settings of the knobs are expected to take: their work, counted for the estimator, and its answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.core.errors import UserError, require
from groupwise.latency.estimator import EstimatedRows, LatencyEstimator
from groupwise.latency.records import DECODE, PREFILL, VISION, EstimatedLatency
from groupwise.latency.regression import Columns, WorkFeatures
from groupwise.workloads.controller.config import BudgetScope
from groupwise.workloads.controller.model.knobs import KnobOptions, Knobs, work_of_answer

KnobTable = Float[Tensor, "tiers positions top_ks blocks"]
"""A number for every configuration, in the order of `KnobOptions.all()`."""


class KnobLatencyModel(Protocol):
    """Anything that can say beforehand what an answer will take."""

    def estimate(self, prompt_tokens: Mapping[str, int], knobs: Sequence[Knobs]) -> Sequence[EstimatedLatency]:
        """For a question with prompts of this length (by tier), the time under each of these knobs."""
        ...


@dataclass(frozen=True)
class LatencyTables:
    """Milliseconds of every configuration of one question."""

    median_ms: KnobTable
    high_ms: KnobTable
    """What an answer stays under with the estimator's high probability."""

    def promised_ms(self, *, guaranteed: bool) -> KnobTable:
        """What is held against a budget: the high quantile where it is guaranteed, else the median."""
        return self.high_ms if guaranteed else self.median_ms


def table_shape(options: KnobOptions) -> tuple[int, int, int, int]:
    return len(options.crops), len(options.insertion_positions), len(options.top_ks), len(options.block_totals)


def latency_tables(
    estimator: KnobLatencyModel, options: KnobOptions, prompt_tokens: Mapping[str, int], scope: BudgetScope = "total"
) -> LatencyTables:
    """Ask the estimator for all configurations at once; refuse what is no time."""
    found = estimator.estimate(prompt_tokens, list(options.all()))
    medians, highs = zip(*(_of_scope(estimated, scope) for estimated in found), strict=True)
    tables = [torch.tensor(column, dtype=torch.float64).view(table_shape(options)) for column in (medians, highs)]
    for table in tables:
        if not (table.isfinite() & (table > 0)).all():
            raise UserError(
                f"The latency estimator gives {table.min().item():g} to {table.max().item():g} ms for prompts of"
                f" {dict(prompt_tokens)} tokens: every estimate must be a finite time above 0. Fit it anew."
            )
    return LatencyTables(*tables)


def _of_scope(estimated: EstimatedLatency, scope: BudgetScope) -> tuple[float, float]:
    """Median and high quantile of the whole answer, or of its way to the first token: without the median of decoding.

    That bounds the high quantile up to the first token from above: decoding adds its median and some spread of its own.
    """
    decode_ms = estimated.stages_ms.get(DECODE, 0.0) if scope == "first_token" else 0.0
    return estimated.total_ms - decode_ms, estimated.high_ms - decode_ms


@dataclass(frozen=True)
class ProportionalEstimator:
    """Time in proportion to counted work: a stand-in where no estimator has been fitted, and honest only in ratios."""

    options: KnobOptions
    crop_ms: float = 0.4
    block_ms: float = 0.25
    pair_ms: float = 0.0004
    decode_ms: float = 0.0
    """Of all decode steps together."""
    spread: float = 0.05
    """How far the high quantile lies above the median, as a share of it."""

    def estimate(self, prompt_tokens: Mapping[str, int], knobs: Sequence[Knobs]) -> list[EstimatedLatency]:
        return [self._estimate(prompt_tokens[each.tier], each) for each in knobs]

    def _estimate(self, tokens: int, knobs: Knobs) -> EstimatedLatency:
        work = work_of_answer(self.options, knobs, tokens)
        stages = {
            VISION: self.crop_ms * work.crops,
            PREFILL: self.block_ms * work.block_rows + self.pair_ms * work.expert_pairs,
            DECODE: self.decode_ms,
        }
        total = sum(stages.values())
        return EstimatedLatency(stages, total, total * (1 + self.spread), 0.95)


Numbers = Float[np.ndarray, " rows"]
FEATURE_VERSION = 2
"""Goes up when the executor does or counts other work for the same setting: estimators of before are then of no use."""


class KnobFeatures:
    """Counted work of every setting of a model, ready for any prompt."""

    def __init__(self, options: KnobOptions):
        self.settings = list(options.all())
        one, two = ([work_of_answer(options, knobs, tokens) for knobs in self.settings] for tokens in (1, 2))
        self._row = {knobs: row for row, knobs in enumerate(self.settings)}
        self._crops = np.array([work.crops for work in one], float)
        self._blocks = np.array([work.block_rows for work in one], float)
        self._pairs = np.array([work.expert_pairs for work in one], float)
        self._pairs_of_one_more = np.array([work.expert_pairs for work in two], float) - self._pairs
        self._check = options.check

    def columns(self, prompt_tokens: Mapping[str, int], knobs: Sequence[Knobs], *, new_tokens: int = 1) -> Columns:
        """For prompts of these lengths by tier, the features of an answer with each of the knobs."""
        require(new_tokens >= 1, "new_tokens", new_tokens, "1 or more")
        for each in knobs:
            if each not in self._row:
                self._check(each)
        rows = np.array([self._row[each] for each in knobs])
        tokens = np.array([prompt_tokens[each.tier] for each in knobs], float)
        pairs = self._pairs[rows], self._pairs_of_one_more[rows]
        return _columns(self._crops[rows], tokens, self._blocks[rows], pairs, steps=new_tokens - 1)

    def features(self, knobs: Knobs, *, prompt_tokens: int, new_tokens: int = 1) -> WorkFeatures:
        """Of one answer."""
        columns = self.columns({knobs.tier: prompt_tokens}, [knobs], new_tokens=new_tokens)
        return {stage: {name: float(column[0]) for name, column in part.items()} for stage, part in columns.items()}


def _columns(
    crops: Numbers, tokens: Numbers, blocks: Numbers, pairs: tuple[Numbers, Numbers], *, steps: int
) -> Columns:
    """n tokens take n - 1 steps; step i attends to the prompt and to the i tokens before.

    `pairs` are those of the last token, and those of every token before it.
    """
    of_last, of_others = pairs
    attended = steps * tokens + steps * (steps + 1) / 2
    return {
        VISION: {"crops": crops, "tokens": tokens},
        PREFILL: {
            "tokens": tokens,
            "blocks": blocks,
            "block_tokens": blocks * tokens,
            "attended": blocks * tokens**2,
            "expert_pairs": of_others * (tokens - 1) + of_last,
        },
        DECODE: {
            "steps": np.full_like(tokens, steps),
            "blocks": steps * blocks,
            "attended": blocks * attended,
            "expert_pairs": steps * of_last,
        },
    }


class KnobLatencyEstimator:
    """An estimator that is asked by knobs, for answers of up to `new_tokens`.

    The time to the first token is the time of an answer of one token.
    """

    def __init__(self, estimator: LatencyEstimator, options: KnobOptions, *, new_tokens: int = 1):
        self.estimator, self.new_tokens, self._work = estimator, new_tokens, KnobFeatures(options)

    def rows(self, prompt_tokens: Mapping[str, int], knobs: Sequence[Knobs] | None = None) -> EstimatedRows:
        """For a question with prompts of these lengths by tier, the time with each of the knobs; all, if none named."""
        chosen = self._work.settings if knobs is None else knobs
        return self.estimator.predict_rows(self._work.columns(prompt_tokens, chosen, new_tokens=self.new_tokens))

    def estimate(self, prompt_tokens: Mapping[str, int], knobs: Sequence[Knobs]) -> list[EstimatedLatency]:
        """The same, one record each."""
        found = self.rows(prompt_tokens, knobs)
        return [found[row] for row in range(len(found))]


def architecture_fingerprint(model: Any) -> str:
    """What decides a model's work: its class, number format and configuration, and how it is run; not its weights."""
    settings = f"{FEATURE_VERSION} {json.dumps(_lasting(model.config.to_dict()), sort_keys=True, default=str)}"
    digest = hashlib.blake2b(settings.encode(), digest_size=8).hexdigest()
    return f"{type(model).__name__} {str(model.dtype).removeprefix('torch.')} {digest}"


def _lasting(value: Any) -> Any:
    """Without what says where a configuration came from or how it is run just now."""
    passing = ("transformers_version", "dtype", "architectures")
    if isinstance(value, dict):
        kept = {name: part for name, part in value.items() if not str(name).startswith("_") and name not in passing}
        return {name: _lasting(part) for name, part in kept.items()}
    return [_lasting(part) for part in value] if isinstance(value, list | tuple) else value
