"""What settings of the knobs are expected to take: their work, counted for the estimator, and its answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from groupwise.core.errors import require
from groupwise.meter.estimator import EstimatedRows, Estimator
from groupwise.meter.latency import DECODE, PREFILL, VISION, Estimated
from groupwise.meter.observation import Columns, Features
from groupwise.workloads.controller.knobs import KnobOptions, Knobs, work_of_answer

Numbers = Float[np.ndarray, " rows"]
_COUNTING = 2
"""Goes up when the executor does or counts other work for the same setting: estimators of before are then of no use."""


class KnobWork:
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

    def features(self, knobs: Knobs, *, prompt_tokens: int, new_tokens: int = 1) -> Features:
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


class KnobEstimator:
    """An estimator that is asked by knobs, for answers of up to `new_tokens`.

    The time to the first token is the time of an answer of one token.
    """

    def __init__(self, estimator: Estimator, options: KnobOptions, *, new_tokens: int = 1):
        self.estimator, self.new_tokens, self._work = estimator, new_tokens, KnobWork(options)

    def rows(self, prompt_tokens: Mapping[str, int], knobs: Sequence[Knobs] | None = None) -> EstimatedRows:
        """For a question with prompts of these lengths by tier, the time with each of the knobs; all, if none named."""
        chosen = self._work.settings if knobs is None else knobs
        return self.estimator.predict_rows(self._work.columns(prompt_tokens, chosen, new_tokens=self.new_tokens))

    def estimate(self, prompt_tokens: Mapping[str, int], knobs: Sequence[Knobs]) -> list[Estimated]:
        """The same, one record each."""
        found = self.rows(prompt_tokens, knobs)
        return [found[row] for row in range(len(found))]


def work_identity(model: Any) -> str:
    """What decides a model's work: its class, number format and configuration, and how it is run; not its weights."""
    settings = f"{_COUNTING} {json.dumps(_lasting(model.config.to_dict()), sort_keys=True, default=str)}"
    digest = hashlib.blake2b(settings.encode(), digest_size=8).hexdigest()
    return f"{type(model).__name__} {str(model.dtype).removeprefix('torch.')} {digest}"


def _lasting(value: Any) -> Any:
    """Without what says where a configuration came from or how it is run just now."""
    passing = ("transformers_version", "dtype", "architectures")
    if isinstance(value, dict):
        kept = {name: part for name, part in value.items() if not str(name).startswith("_") and name not in passing}
        return {name: _lasting(part) for name, part in kept.items()}
    return [_lasting(part) for part in value] if isinstance(value, list | tuple) else value
