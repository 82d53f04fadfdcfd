"""What becomes of a step with a log-probability, reward, loss or gradient that is not finite.

The step is not trained: with `--on-nonfinite stop` the run ends, with `skip` it goes on without the update. All ranks
decide alike, because each decision is made from numbers that all of them have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.reward import too_many_missing
from groupwise.core.types import Rollouts
from groupwise.dist.comm import Comm
from groupwise.training.config import Config, RunConfig
from groupwise.training.run_folder.folder import NONFINITE

if TYPE_CHECKING:
    from groupwise.training.rollout import Round

MOST_GROUPS = 4
"""Groups of one step that are saved."""


class NonfiniteError(UserError):
    """A number of the step is not finite."""

    def __init__(self, message: str, samples: Sequence[dict[str, Any]] = ()):
        super().__init__(message)
        self.samples = samples
        """The rollouts of the offending groups, the same on all ranks."""


@dataclass(frozen=True)
class NonfiniteStep:
    """Why a step was not trained, and which rows of the whole step it was."""

    reason: str
    rows: Tensor


class NonfinitePolicy:
    """Counts the steps that were not trained, and stops the run where the user wants it."""

    def __init__(self, config: RunConfig):
        self._config = config
        self.in_a_row = 0
        self.problem: NonfiniteStep | None = None
        """Of the current step."""

    def step_metrics(self) -> dict[str, float]:
        """A column of metrics.jsonl where steps may be skipped."""
        return {"skipped_step": float(self.in_a_row > 0)} if self._config.on_nonfinite == "skip" else {}

    def decide(self, samples: Sequence[dict[str, Any]]) -> None:
        """Go on, or raise the error that ends the run."""
        problem = self.problem
        self.in_a_row = self.in_a_row + 1 if problem else 0
        if problem is None:
            return
        saved = f" The rollouts of the groups concerned are in {NONFINITE} of the run folder." if samples else ""
        if self._config.on_nonfinite == "stop":
            remedy = f"{saved} --on-nonfinite skip leaves such steps out and goes on."
            raise NonfiniteError(problem.reason + remedy, samples)
        limit = self._config.max_skipped
        if self.in_a_row > limit:
            raise NonfiniteError(
                f"{self.in_a_row} steps in a row could not be trained, and --max-skipped is {limit}. The last:"
                f" {problem.reason}{saved}",
                samples,
            )


def nonfinite_rollouts(batch: Round, config: Config, comm: Comm) -> NonfiniteStep | None:
    """Log-probabilities of decisions that are not finite, or too many rewards that are missing; None for neither."""
    problem = _nonfinite_logp(batch.rollouts, batch.placement.step, comm)
    if problem:
        return problem
    reason = too_many_missing(batch.rewards, config.reward)
    return NonfiniteStep(reason, batch.rewards.is_missing.nonzero().flatten()) if reason else None


def refuse_nonfinite_logp(rollouts: Rollouts, step: int, comm: Comm) -> None:
    """For rollouts before the first step: there is nothing to skip yet."""
    problem = _nonfinite_logp(rollouts, step, comm)
    if problem:
        raise NonfiniteError(problem.reason)


def _nonfinite_logp(rollouts: Rollouts, step: int, comm: Comm) -> NonfiniteStep | None:
    broken = comm.gather((~rollouts.logp.isfinite() & rollouts.mask).any(1).cpu())
    if not broken.any():
        return None
    return NonfiniteStep(
        f"{int(broken.sum())} of {len(broken)} rollouts of step {step} have a log-probability that is not finite."
        " Either the policy's weights are no longer finite (lower optimizer.learning_rate), or a decision was taken to"
        " which the policy gives probability 0.",
        broken.nonzero().flatten(),
    )


def rows_of_groups(problem: NonfiniteStep, batch: Round) -> Tensor:
    """The rows of the whole step that are in the first groups with an offending row."""
    groups = batch.placement.group
    return torch.isin(groups, groups[problem.rows].unique()[:MOST_GROUPS]).nonzero().flatten()
