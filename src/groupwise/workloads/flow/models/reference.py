"""The policy that training began with, without a second model: the adapter switched off, or the first weights lent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class FirstWeights:
    """Copies of the weights that are trained, as they are when this is made."""

    def __init__(self, policy: nn.Module):
        self._policy = policy
        self._first = {
            name: weight.detach().clone() for name, weight in policy.named_parameters() if weight.requires_grad
        }

    @contextmanager
    @torch.no_grad()
    def lent(self) -> Iterator[None]:
        """Meanwhile the policy holds its first weights; then its own again, bit by bit.

        The tensors change places, not their contents: a graph that was built on the present weights stays valid.
        """
        weights = {name: dict(self._policy.named_parameters())[name] for name in self._first}
        present = {name: weight.data for name, weight in weights.items()}
        try:
            for name, weight in weights.items():
                weight.data = self._first[name]
            yield
        finally:
            for name, weight in weights.items():
                weight.data = present[name]
