"""StepSpec in, bytes by part at the peak of rollout and update out; weights, gradients, optimizer. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from groupwise.core.shape import StepShape
from groupwise.memory.sharding import Sharding, ShardUnits, UnitParams, per_rank

BytesByPart = Mapping[str, int]
FRAMEWORK_PART = "framework (margin)"
FRAMEWORK_MARGIN_BYTES, FRAMEWORK_MARGIN_SHARE = 512 << 20, 0.05
"""What an accelerator's context, workspaces and fragmentation add: an assumption, not derived."""


@dataclass(frozen=True)
class StepSpec:
    """The numbers of a run that decide its memory, whatever the workload."""

    shape: StepShape
    has_ema: bool = False
    fused_optimizer: bool = False
    """AdamW's step needs no temporaries, as on CPU and CUDA. False also while the device is not known."""
    sharding: Sharding | None = None
    """None where each rank has a whole copy."""

    def conditions_in(self, rows: int) -> int:
        """Most different conditions in a pass of so many rows: few where a group stays on one rank.

        A pass begins at a multiple of gcd(rows, group_size) inside a group; the last such multiple is the worst case.
        """
        shape = self.shape
        if shape.placement != "whole":
            return min(rows, shape.conditions_per_step)
        begins_at = shape.group_size - math.gcd(rows, shape.group_size)
        return min(-(-(begins_at + rows) // shape.group_size), shape.conditions_per_step // shape.ranks)


@dataclass(frozen=True)
class StageBytes:
    """Bytes by part at the peak of each stage. A stage's parts add up to its peak."""

    rollout: BytesByPart
    update: BytesByPart

    @property
    def peak(self) -> int:
        return max(sum(self.rollout.values()), sum(self.update.values()))

    @property
    def largest_stage(self) -> str:
        return "rollout" if sum(self.rollout.values()) > sum(self.update.values()) else "update"

    def with_margin(self) -> StageBytes:
        """With what an accelerator's framework adds."""
        return StageBytes(_with_margin(self.rollout), _with_margin(self.update))

    def to_dict(self) -> dict[str, dict[str, int]]:
        return {"rollout": dict(self.rollout), "update": dict(self.update)}


@dataclass(frozen=True)
class WeightBytes:
    """Weights in memory, and what training them adds."""

    frozen_params: int
    trained_params: int
    frozen_dtype_bytes: int = 4
    trained_dtype_bytes: int = 4
    units: ShardUnits | None = None
    """What is gathered together where weights are sharded; None for a model that is one unit."""

    def by_part(self, spec: StepSpec, *, reference_copies: int = 0, one_backward: bool | None = None) -> dict[str, int]:
        """AdamW keeps two moments of every trained parameter, in the parameter's own dtype.

        `one_backward` says whether a step has one backward pass alone; None for one in each pass.
        """
        trained = self.trained_params * self.trained_dtype_bytes
        weights = self.frozen_params * self.frozen_dtype_bytes + trained
        gradients = trained if self._sums_uncut_gradients(spec, one_backward) else per_rank(trained, spec.sharding)
        return {
            "weights": per_rank(weights, spec.sharding),
            "gradients": gradients,
            "optimizer": per_rank(2 * trained, spec.sharding),
            "EMA weights": per_rank(trained, spec.sharding) if spec.has_ema else 0,
            "reference": reference_copies * per_rank(weights, spec.sharding),
        }

    def optimizer_temporaries(self, spec: StepSpec, *, one_backward: bool | None = None) -> int:
        """Intermediate results of AdamW's step: one number for every parameter, or none where it is fused.

        None also where uncut gradients, which the exchange has freed by then, took more than the temporaries take.
        """
        if spec.fused_optimizer or self._sums_uncut_gradients(spec, one_backward):
            return 0
        return per_rank(self.trained_params * self.trained_dtype_bytes, spec.sharding)

    def while_gathered_in_rollout(self, spec: StepSpec, candidates: Sequence[BytesByPart]) -> list[BytesByPart]:
        """The candidates for a rollout's peak, with what is gathered then."""
        if spec.sharding is None:
            return list(candidates)
        gathered = self._units.rollout_bytes(spec.sharding.rollout)
        return [{**gathered, **candidate} for candidate in candidates]

    def while_gathered_in_update(self, spec: StepSpec, candidates: Sequence[BytesByPart]) -> list[BytesByPart]:
        """The candidates for a pass's peak, with what is gathered then; and the exchange of the root's gradient."""
        if spec.sharding is None:
            return list(candidates)
        gathered = self._units.update_bytes()
        return [*({**gathered, **candidate} for candidate in candidates), self._units.root_exchange_bytes()]

    @property
    def _units(self) -> ShardUnits:
        root = UnitParams(self.frozen_params, self.trained_params)
        number = self.trained_dtype_bytes
        return self.units or ShardUnits(UnitParams(), root, root.total, number, number)

    def _sums_uncut_gradients(self, spec: StepSpec, one_backward: bool | None) -> bool:
        one_backward = spec.shape.passes == 1 if one_backward is None else one_backward
        return spec.sharding is not None and spec.sharding.exchange == "step" and not one_backward


def peak_of_rollout(persistent: BytesByPart, candidates: Sequence[BytesByPart]) -> dict[str, int]:
    """The largest of the candidates, on top of what persists: all but the gradients."""
    without_gradients = {name: size for name, size in persistent.items() if name != "gradients"}
    return drop_zero({**without_gradients, **_largest(candidates)})


def peak_of_update(
    persistent: BytesByPart, candidates: Sequence[BytesByPart], optimizer_temporaries: int, *, one_pass: bool
) -> dict[str, int]:
    """The peak of an update: the largest of its passes' candidates, or the optimizer's step.

    In a step of one pass, gradients are made while activations are freed: only the larger of the two is held.
    """
    candidate = _largest(candidates)
    activations, gradients = sum(candidate.values()), persistent["gradients"]
    held_gradients = max(0, gradients - activations) if one_pass else gradients
    if held_gradients + activations >= gradients + optimizer_temporaries:
        return drop_zero({**persistent, "gradients": held_gradients, **candidate})
    return drop_zero({**persistent, "optimizer temporaries": optimizer_temporaries})


def drop_zero(parts: BytesByPart) -> dict[str, int]:
    return {name: size for name, size in parts.items() if size}


def _largest(candidates: Sequence[BytesByPart]) -> BytesByPart:
    return max(candidates, key=lambda parts: sum(parts.values()))


def _with_margin(parts: BytesByPart) -> BytesByPart:
    margin = FRAMEWORK_MARGIN_BYTES + int(FRAMEWORK_MARGIN_SHARE * sum(parts.values()))
    return {**parts, FRAMEWORK_PART: margin}
