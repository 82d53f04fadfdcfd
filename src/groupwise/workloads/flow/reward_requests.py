"""Asks reward services about the clips of one pass while the next pass is denoised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from groupwise.core.types import RewardTerms
from groupwise.rewards.call import RewardFunction
from groupwise.rewards.http import HttpReward
from groupwise.workloads.flow.rewards import clip_rewards
from groupwise.workloads.flow.task import Condition


@dataclass(frozen=True)
class _Pass:
    """The clips of a pass, and the rewards that were asked for."""

    first: int
    """The number of its first row."""
    clips: Tensor
    answer: Future[RewardTerms]

    @property
    def rows(self) -> range:
        return range(self.first, self.first + len(self.clips))


class RewardRequests:
    """One request after the other, in a thread. Rows are numbered, so that any of them can be collected later."""

    def __init__(self, functions: Mapping[str, RewardFunction]):
        self.services = {name: function for name, function in functions.items() if isinstance(function, HttpReward)}
        self._thread = ThreadPoolExecutor(1) if self.services else None
        self._passes: list[_Pass] = []
        self._next = 0

    def forget(self) -> None:
        """Of rollouts that are not used: those that are generated again with fewer rows in a pass."""
        for part in self._passes:
            part.answer.cancel()
        self._passes = []

    def submit(self, conditions: Sequence[Condition], clips: Float[Tensor, "rows ..."]) -> Int64[Tensor, " rows"]:
        """Ask all services about these clips; the numbers of their rows."""
        assert self._thread is not None
        answer = self._thread.submit(clip_rewards, self.services, conditions, clips)
        self._passes.append(_Pass(self._next, clips, answer))
        self._next += len(clips)
        return torch.arange(self._passes[-1].first, self._next)

    def clips(self, rows: Int64[Tensor, " rows"]) -> Tensor:
        """The clips that were submitted, as they were decoded."""
        return torch.cat([part.clips for part in self._passes])[self._positions(rows)]

    def collect(self, rows: Int64[Tensor, " rows"]) -> RewardTerms:
        """The services' rewards for these rows, when they have arrived."""
        answers, positions = [part.answer.result() for part in self._passes], self._positions(rows)
        failures = {name: reason for terms in answers for name, reason in terms.failures.items()}
        columns = {name: torch.cat([terms.per_rollout[name] for terms in answers]) for name in self.services}
        return RewardTerms({name: column[positions] for name, column in columns.items()}, failures)

    def release(self, rows: Int64[Tensor, " rows"]) -> None:
        """These rows were rewarded: clips of passes without others are not needed any more."""
        done = set(rows.tolist())
        self._passes = [part for part in self._passes if not done.issuperset(part.rows)]

    def holds(self, rows: Int64[Tensor, " rows"]) -> bool:
        """Whether these rows were submitted, and not released or forgotten."""
        return {row for part in self._passes for row in part.rows}.issuperset(rows.tolist())

    def _positions(self, rows: Int64[Tensor, " rows"]) -> Tensor:
        """Of rows among all that are held."""
        return torch.searchsorted(torch.cat([torch.tensor(part.rows) for part in self._passes]), rows)
