"""Workload (what training needs), Reporter (what people see), WorkloadConfig and EvaluationReport.

Torch is imported for type checking only, so that configs load without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from groupwise.core.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from groupwise.core.placement import RolloutRows
    from groupwise.core.types import RewardTerms, Rollouts, Scores
    from groupwise.memory.plan import MemoryModel
    from groupwise.memory.stages import StepSpec

MAX_LORA_RANK = 65_536
"""Wider than the layers that get an adapter."""


class Reporter:
    """What people see of a workload. Every method is optional, and nothing here can change a result."""

    def step_metrics(self, rollouts: Rollouts, advantages: Tensor) -> Mapping[str, Tensor]:
        """Named numbers, one a row (NaN where a row has none); their means over the step go into metrics.jsonl.

        The same names on every rank.
        """
        return {}

    def step_warning(self, metrics: Mapping[str, float]) -> str | None:
        """A sentence when the metrics of a step say that something is wrong. `--on-warning stop` ends the run."""
        return None

    def describe_rollouts(self, rollouts: Rollouts) -> Sequence[Mapping[str, Any]]:
        """What a person wants to see of each row (JSON values), for samples.jsonl."""
        return [{} for _ in range(len(rollouts))]

    def images(self) -> Mapping[str, Callable[[Path], None]]:
        """Images of held-out data under the current policy, by file name; kept at every evaluation. One rank only."""
        return {}

    def preflight_notes(self) -> Sequence[str]:
        """What a person should know before training starts; shown with the preflight checks."""
        return ()

    def start_warnings(self) -> Sequence[str]:
        """What a person should change or accept before training starts; shown as warnings."""
        return ()

    def final_report(self) -> EvaluationReport | None:
        """The evaluation that `groupwise eval` shows; may take minutes. One rank only."""
        return None


class Workload(ABC):
    """Anything that makes a sequence of decisions: a policy and three methods. This is what training needs."""

    policy: nn.Module
    """What is trained: its parameters that require a gradient, in float32 or float64."""
    num_conditions: int
    """Size of the dataset."""
    num_held_out: int = 0
    """Held-out rows to evaluate; each rank gets a part of them."""
    reporter: Reporter = Reporter()
    """What people see; replaced by workloads that have more to say."""
    compute_dtype: str | None = None
    """The dtype of the policy's products where it is less exact than its log-probabilities, such as "bfloat16": what is
    sampled and what is scored then differ by its rounding."""
    row_limits: Mapping[str, int] = {}
    """The workload's own limits on rows processed at once: decode_rows (rollout), encode_rows (rewards), eval_rows
    (evaluation). Set them in __init__, read them on every call: they are halved when memory runs out in their stage."""

    @abstractmethod
    def rollout(self, rows: RolloutRows) -> Rollouts:
        """Roll out each row's condition once, without gradient, with random numbers from `rows` only.

        The result has the same row order. A row's outcome must not depend on the other rows; `rows.passes()` splits
        them where memory matters.
        """

    @abstractmethod
    def rewards(self, rollouts: Rollouts) -> RewardTerms:
        """One number a row for every named reward, NaN where it is missing.

        A row's rewards may depend on the other members of its group, never on other groups: when memory runs out, a
        call gets fewer groups.
        """

    @abstractmethod
    def score(self, rollouts: Rollouts) -> Scores:
        """Log-probs of the same decisions under the current policy, with gradient."""

    def score_parts(self, rollouts: Rollouts) -> Sequence[Callable[[], Scores]]:
        """`score` in parts: functions that score some consecutive decisions each, all of them together.

        Training calls them one after the other, each with its backward pass, so that only the graph of one is held.
        """
        return [partial(self.score, rollouts)]

    def idle_parts(self, rollouts: Rollouts) -> Sequence[str]:
        """Children of the policy that these rollouts do not use, by name, so that they have no gradient."""
        return ()

    def passes(self, rollouts: Rollouts, rows_per_pass: int) -> Iterable[Tensor]:
        """Indices of the rows that `score` gets together, pass after pass; at most `rows_per_pass` at a time.

        The rows are those of this rank that are trained. Split and order affect memory and speed only.
        """
        import torch

        return torch.arange(len(rollouts)).split(rows_per_pass)

    def expected_costs(self, conditions: Tensor) -> Tensor | None:
        """How long a rollout of each condition is expected to take and to train, in any unit; None for equally long.

        A function of the condition alone, so that all ranks agree. Ranks get groups that add up to about the same.
        """
        return None

    def shard_blocks(self) -> Sequence[nn.Module]:
        """Parts of the policy whose weights are gathered one at a time when training is sharded, each called as a
        module; none for the layers of its module lists. All other weights are gathered together.
        """
        return ()

    def shard_dtype(self) -> torch.dtype | None:
        """The dtype in which a sharded policy gathers its weights and computes; None for that of the weights."""
        return None

    def frozen_models(self) -> Sequence[tuple[nn.Module, Sequence[nn.Module]]]:
        """Models beside the policy that `score` uses and that are sharded with it, each with its blocks."""
        return ()

    def evaluate(self, rows: Tensor) -> Mapping[str, Tensor]:
        """Named numbers of these held-out rows, a row on the first axis, NaN where there is none.

        The same names whatever the rows. The policy holds the EMA weights if there are any.
        """
        return {}

    def summarize_evaluation(self, columns: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Metrics from the numbers of all held-out rows, in order: their means."""
        return {name: column.double().nanmean().item() for name, column in columns.items()}

    def checkpoint_files(self) -> Mapping[str, bytes]:
        """JSON files that every checkpoint holds, and the run folder from the start: what is needed to use the policy
        without this workload.

        A run whose files differ from its checkpoint's is not resumed.
        """
        return {}


@dataclass(frozen=True)
class WorkloadConfig:
    """The settings of a workload. Subclass it beside the workload and import torch inside `build`."""

    def build(self, device: torch.device) -> Workload:
        """The workload, its policy on the device; the same on every rank."""
        raise NotImplementedError(f"{type(self).__name__} must define build(device)")

    def for_resume(self, saved: Path) -> Self:
        """The same settings for a run that goes on: what would be measured again may be read from a folder that holds
        the files of `Workload.checkpoint_files()`, a checkpoint or `start/` of a run that has none yet."""
        return self

    def memory_model(self) -> MemoryModel | None:
        """The workload's memory in integers, without building it; None where it is not known."""
        return None

    def trace_memory(self, spec: StepSpec) -> Mapping[str, int]:
        """Peak bytes of the stages ('rollout', 'update'), by running the real code on fake tensors."""
        raise UserError(
            f"{type(self).__name__} has no trace of its memory (its method trace_memory(spec)). `--probe` runs a"
            " real step."
        )


@dataclass(frozen=True)
class ReportTable:
    """A table for the terminal: all cells are text."""

    title: str
    columns: Sequence[str]
    """The first is aligned left, the others right."""
    rows: Sequence[Sequence[str]]
    """An empty row separates sections."""
    note: str = ""


@dataclass(frozen=True)
class EvaluationReport:
    metrics: Mapping[str, Any]
    """JSON values; they become part of eval.json."""
    tables: Sequence[ReportTable] = ()
    images: Mapping[str, Callable[[Path], None]] | None = None
    """By file name: writes the image to a path in the run folder."""
