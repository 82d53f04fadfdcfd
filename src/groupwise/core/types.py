"""The records that go from stage to stage: Rollouts, Scores, RewardTerms, Advantages. Rows are always the first axis.

The words of this project:

condition           what a rollout starts from: a prompt, a camera path, an image with a question and a budget
group               the group_size rollouts of one condition; they are compared only with each other
member              one rollout of a group, by its number from 0
rollout             one sequence of decisions with its reward; one row of a batch
decision            one sampled choice with a log-probability: a token, a denoising step, a knob of inference
pass                rows that go through the model together, at most rows_per_pass
round               rollouts and rewards of conditions_per_step conditions; with refill a step may have several
spread              a group has spread when its rewards differ; without it it contributes no gradient
tier                how finely an image is cut into crops (controller)
insertion position  the number of blocks that run before the controller makes its second choice
latency token       a token after the prompt; the controller reads its hidden state at the insertion position
window              the denoising steps that are sampled with noise and trained (flow)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from groupwise.core.transfer import send


@dataclass(frozen=True)
class Rollouts:
    """Sampled decisions, with the log-probability of each under the policy that sampled it."""

    group_ids: Int64[Tensor, " rows"]
    logp: Float[Tensor, "rows decisions"]
    mask: Bool[Tensor, "rows decisions"]
    """False where a row has no decision (padding), or one that is not trained."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """What the workload needs to score its rows and compute their rewards: tensors or sequences, one entry a row."""

    def __len__(self) -> int:
        return len(self.group_ids)

    def decisions(self, part: slice) -> Rollouts:
        """All rows with some of their decisions."""
        return Rollouts(self.group_ids, self.logp[:, part], self.mask[:, part], self.data)

    def select(self, rows: Int64[Tensor, " some"]) -> Rollouts:
        """These rows, in this order."""
        tensors = [self.group_ids, self.logp, self.mask, *self.data.values()]
        devices = {column.device for column in tensors if isinstance(column, Tensor)}
        rows_on = {device: send(rows, device) for device in devices}  # sent once for all columns
        return Rollouts(
            self.group_ids[rows_on[self.group_ids.device]],
            self.logp[rows_on[self.logp.device]],
            self.mask[rows_on[self.mask.device]],
            {name: _select(column, rows, rows_on) for name, column in self.data.items()},
        )


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of sampled decisions under the current policy, with gradient."""

    logp: Float[Tensor, "rows decisions"]
    entropy: Float[Tensor, "rows decisions"] | None = None
    reference_logp: Float[Tensor, "rows decisions"] | None = None
    """Under the reference policy, without gradient; needed when the KL weight is above 0, unless `kl` is given."""
    kl: Float[Tensor, "rows decisions"] | None = None
    """KL divergence from the reference policy in closed form, with gradient, where it is known."""

    def by_name(self) -> dict[str, Tensor]:
        """Those that are given."""
        columns = {name: getattr(self, name) for name in ("logp", "entropy", "reference_logp", "kl")}
        return {name: column for name, column in columns.items() if column is not None}


def concatenate_scores(parts: Sequence[Scores]) -> Scores:
    """The scores of all decisions, from those of consecutive ones."""
    names = parts[0].by_name()
    return Scores(**{name: torch.cat([part.by_name()[name] for part in parts], dim=1) for name in names})


@dataclass(frozen=True)
class RewardTerms:
    """Named rewards, one number a row; NaN where a reward is missing."""

    per_rollout: Mapping[str, Float[Tensor, " rows"]]
    failures: Mapping[str, str] = field(default_factory=dict)
    """Why a term is missing, by its name."""
    per_decision: Mapping[str, Float[Tensor, "rows decisions"]] = field(default_factory=dict)
    """Named rewards of single decisions, on top of the row's; NaN where one is missing."""


@dataclass(frozen=True)
class Advantages:
    """How much better each rollout of the step is than the other members of its group."""

    values: Float[Tensor, " rollouts"] | Float[Tensor, "rollouts decisions"]
    """One number a rollout, or one a decision where decisions have rewards of their own."""
    trained: Bool[Tensor, " rollouts"]
    """False for a missing reward and for a group without spread: such rows are in no loss and no denominator."""
    groups: int
    zero_spread_groups: int
    trained_mask: Bool[Tensor, "rollouts decisions"] | None = None
    """The same for each decision, where decisions have rewards of their own."""


def _select(column: Any, rows: Tensor, rows_on: Mapping[torch.device, Tensor]) -> Any:
    if isinstance(column, Tensor):
        return column[rows_on[column.device]]
    assert isinstance(column, Sequence), f"a column of rollouts is a tensor or a sequence, not {type(column).__name__}"
    return [column[row] for row in rows.tolist()]


def concatenate_rollouts(parts: Sequence[Rollouts]) -> Rollouts:
    """Several batches as one; shorter rows are padded on the right and masked."""
    width = max(part.logp.shape[1] for part in parts)
    names = parts[0].data
    return Rollouts(
        torch.cat([part.group_ids for part in parts]),
        torch.cat([_pad_width(part.logp, width) for part in parts]),
        torch.cat([_pad_width(part.mask, width) for part in parts]),
        {name: _concatenate_column([part.data[name] for part in parts]) for name in names},
    )


def _pad_width(matrix: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(matrix, (0, width - matrix.shape[1]))


def _concatenate_column(columns: Sequence[Any]) -> Any:
    if isinstance(columns[0], Tensor):
        return torch.cat(list(columns))
    return [entry for column in columns for entry in column]
