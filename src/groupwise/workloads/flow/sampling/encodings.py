"""Encodings of conditions, computed once: text encoder and VAE run once per condition, not per member."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from groupwise.workloads.flow.models.base import Conditioning, FlowModel
from groupwise.workloads.flow.task import Condition


class ConditioningCache:
    """The newest `remembered` conditions' encodings, on the CPU."""

    def __init__(self, model: FlowModel, conditions: Sequence[Condition], *, remembered: int, rows_per_pass: int):
        self._model, self._conditions = model, conditions
        self._remembered, self._rows_per_pass = remembered, rows_per_pass
        self._known: OrderedDict[int, Conditioning] = OrderedDict()
        self.computed = 0
        """How often a condition was encoded."""

    def of(self, rows: Tensor, device: torch.device) -> Conditioning:
        """The encodings of these conditions, a row each, on the device."""
        numbers = rows.tolist()
        found = {number: self._known[number] for number in dict.fromkeys(numbers) if number in self._known}
        missing = [number for number in dict.fromkeys(numbers) if number not in found]
        for start in range(0, len(missing), self._rows_per_pass):
            part = missing[start : start + self._rows_per_pass]
            encoded = self._model.encode([self._conditions[number] for number in part])
            self.computed += len(part)
            found |= dict(zip(part, encoded, strict=True))
        self._remember(found)
        names = next(iter(found.values()))
        return {name: torch.stack([found[number][name] for number in numbers]).to(device) for name in names}

    def _remember(self, found: dict[int, Conditioning]) -> None:
        for number, encoding in found.items():
            self._known[number] = encoding
            self._known.move_to_end(number)
        while len(self._known) > self._remembered:
            self._known.popitem(last=False)
