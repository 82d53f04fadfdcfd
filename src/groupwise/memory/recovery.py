"""Recovery from out-of-memory errors: all ranks halve the same row limit and repeat the stage. The result is the same.

Every stage that may fail runs inside `comm.fail_together`, which raises `OutOfMemoryError` on all ranks when one of
them ran out of memory. So all ranks get here with the same error and halve the same limit; none is left waiting.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

from groupwise.core.errors import OutOfMemoryError, UserError

P = ParamSpec("P")
T = TypeVar("T")
Stage = Literal["rollout", "reward", "update", "evaluation"]
RowLimits = dict[str, int]
"""Most rows that are processed at once, by the name of the limit."""

LIMIT_NAMES: Mapping[Stage, tuple[str, ...]] = {
    "rollout": ("decode_rows", "rows_per_pass"),
    "reward": ("encode_rows", "reward_rows"),
    "update": ("rows_per_pass",),
    "evaluation": ("eval_rows",),
}
"""The limits that a stage may halve, in this order. Every run has rows_per_pass and reward_rows (rows that rewards()
gets in one call, in whole groups); the others exist where the workload sets them in `row_limits`."""

GENERAL_ADVICE = (
    "sizes of the workload that no pass can split: length of a rollout, resolution, number of frames",
    "the dtype: bfloat16 takes half the bytes of float32",
    "the trained parameters: an adapter needs gradients and optimizer state for itself only",
)
"""For a workload without a memory plan. These change what is learned, so none of them is changed automatically."""


class LimitedWorkload(Protocol):
    """What recovery needs to know of a workload."""

    policy: nn.Module
    row_limits: Mapping[str, int]


class Recovery:
    """Repeats a stage with smaller batches after an out-of-memory error.

    `limits` is the one dict of row limits: the state, its checkpoints and the workload share it.
    """

    def __init__(
        self,
        workload: LimitedWorkload,
        *,
        rows_per_pass: int,
        rows_per_rank: int,
        warn: Callable[[str], None],
        advice: Callable[[], Sequence[str]] = lambda: GENERAL_ADVICE,
        begin: Callable[[Stage], None] = lambda stage: None,
    ):
        """`begin` hears which stage is tried."""
        self.limits: RowLimits = {**workload.row_limits, "rows_per_pass": rows_per_pass}
        self.oom_retries = 0
        """Since the last complete step."""
        self._configured = dict(self.limits)
        self._workload, self._rows_per_rank, self._warn, self._advice = workload, rows_per_rank, warn, advice
        self._begin = begin
        workload.row_limits = self.limits

    def retry_smaller(self, stage: Stage, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's result; after an out-of-memory error a row limit is halved and the function called again."""
        before = RngAndBuffers.capture(self._workload.policy)
        while True:
            self._begin(stage)
            try:
                return function(*args, **kwargs)
            except OutOfMemoryError as error:
                message = str(error)
            # Only outside the clause is the error gone, and with it the frames that held the tensors.
            self.oom_retries += 1
            release_memory()
            before.restore(self._workload.policy)
            self._halve(stage, message)

    def step_metrics(self) -> dict[str, float]:
        """The retries of a complete step, and the limits in force: rows_per_pass, and those that were lowered."""
        retries, self.oom_retries = self.oom_retries, 0
        lowered = {name: rows for name, rows in self.limits.items() if rows != self._configured.get(name)}
        shown = {"rows_per_pass": self.limits["rows_per_pass"], **lowered}
        return {"oom_retries": float(retries), **{name: float(rows) for name, rows in shown.items()}}

    def restore(self, saved: Mapping[str, int]) -> RowLimits:
        """Continue with the limits of a checkpoint where they are lower than configured; returns those."""
        known = {name: self._rows(name) for names in LIMIT_NAMES.values() for name in names if self._has(name)}
        lowered = {name: rows for name, rows in saved.items() if name in known and rows < known[name]}
        self.limits.update(lowered)
        return lowered

    def _halve(self, stage: Stage, message: str) -> None:
        names = [name for name in LIMIT_NAMES[stage] if self._has(name)]
        name = next((name for name in names if self._rows(name) > 1), None)
        if name is None:
            hopeless = UserError(self._cannot_shrink_further(stage, names, message))
            hopeless.on_all_ranks = True
            raise hopeless
        rows = self._rows(name)
        # A limit above what a rank has splits nothing: half of what it has is the first that helps.
        self.limits[name] = max(1, (rows if stage == "evaluation" else min(rows, self._rows_per_rank)) // 2)
        repeated = "evaluation" if stage == "evaluation" else "step"
        self._warn(
            f"Out of memory in {stage}: {message} {name} {rows} -> {self.limits[name]}; the {repeated} is repeated, its"
            " result is the same."
        )

    def _has(self, name: str) -> bool:
        return name in self.limits or name == "reward_rows"

    def _rows(self, name: str) -> int:
        return self.limits.get(name, self._rows_per_rank)

    def _cannot_shrink_further(self, stage: Stage, names: Sequence[str], message: str) -> str:
        if not names:
            return (
                f"Out of memory in {stage}, and {type(self._workload).__name__} has no limit for its rows there"
                f" ('{LIMIT_NAMES[stage][-1]}' in row_limits): {message} Evaluate on fewer rows, or set that limit."
            )
        listed = "; ".join(f"{number}. {step}" for number, step in enumerate(self._advice(), 1))
        return (
            f"Out of memory in {stage} with {names[-1]} {self._rows(names[-1])}, which cannot be halved: {message} What"
            f" to reduce, in this order: {listed}. The complete steps are in the newest checkpoint; --resume continues"
            " from there."
        )


@dataclass(frozen=True)
class RngAndBuffers:
    """What a stage may change before it fails: random generators and the policy's buffers."""

    generators: tuple[Tensor, ...]
    buffers: Mapping[str, Tensor]

    @staticmethod
    def capture(policy: nn.Module) -> RngAndBuffers:
        buffers = {name: buffer.clone() for name, buffer in policy.named_buffers()}
        return RngAndBuffers(tuple(module.get_rng_state() for module in _generators()), buffers)

    def restore(self, policy: nn.Module) -> None:
        for module, state in zip(_generators(), self.generators, strict=True):
            module.set_rng_state(state)
        for name, buffer in policy.named_buffers():
            buffer.copy_(self.buffers[name])


def _generators() -> list[Any]:
    """The modules whose generators the current device uses."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return [torch.random, *([torch.get_device_module(accelerator)] if accelerator is not None else [])]


def release_memory() -> None:
    """Return unreferenced memory to the device before the next attempt."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
