"""A cache of encoded conditions: text encoder and VAE run once per condition, not once per member."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from groupwise.core.transfer import send
from groupwise.workloads.flow.models.base import Conditioning, FlowModel
from groupwise.workloads.flow.task import Condition


class ConditioningCache:
    """The encodings of the `max_cached` conditions that were used last, on the CPU.

    Not functools.lru_cache: that calls a function for one condition at a time, and conditions are encoded in batches.
    """

    def __init__(self, model: FlowModel, conditions: Sequence[Condition], *, max_cached: int, encode_rows: int):
        self._model, self._conditions = model, conditions
        self._max_cached, self._encode_rows = max_cached, encode_rows
        self._cached: dict[int, Conditioning] = {}  # least recently used first
        self.num_encoded = 0
        """How many conditions were encoded so far; one that was dropped and encoded again counts twice."""

    def of(self, rows: Tensor, device: torch.device) -> Conditioning:
        """The conditioning of these conditions, one row for each, on the device."""
        indices = rows.tolist()
        used = {index: self._cached[index] for index in dict.fromkeys(indices) if index in self._cached}
        missing = [index for index in dict.fromkeys(indices) if index not in used]
        for start in range(0, len(missing), self._encode_rows):
            batch = missing[start : start + self._encode_rows]
            encoded = self._model.encode([self._conditions[index] for index in batch])
            self.num_encoded += len(batch)
            used |= zip(batch, encoded, strict=True)
        unused = [(index, conditioning) for index, conditioning in self._cached.items() if index not in used]
        self._cached = dict([*unused, *used.items()][-self._max_cached :])
        names = next(iter(used.values()))
        return {name: send(torch.stack([used[index][name] for index in indices]), device) for name in names}
