"""StepSpec in, bytes by part at the peak of rollout and update out; weights, gradients, optimizer. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from groupwise.core.shape import BUCKET_NUMEL, StepShape
from groupwise.memory.sharding import EXCHANGE_BUFFERS, Sharding, ShardUnits, UnitParams, per_rank

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
    offloads_optimizer: bool = False
    """Moments are in host memory; those that an update has on the device, of one weight at a time, are not counted."""

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
    host: BytesByPart = field(default_factory=dict)
    """In host memory besides: what is kept there, and the copy that a checkpoint is written from."""

    @property
    def peak(self) -> int:
        return max(sum(self.rollout.values()), sum(self.update.values()))

    @property
    def largest_stage(self) -> str:
        return "rollout" if sum(self.rollout.values()) > sum(self.update.values()) else "update"

    def with_margin(self) -> StageBytes:
        """With what an accelerator's framework adds."""
        return replace(self, rollout=_with_margin(self.rollout), update=_with_margin(self.update))

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

    def by_part(self, spec: StepSpec, *, reference_copies: int = 0) -> dict[str, int]:
        """AdamW keeps two moments of every trained parameter, in the parameter's own dtype."""
        trained = self.trained_params * self.trained_dtype_bytes
        weights = self.frozen_params * self.frozen_dtype_bytes + trained
        parts = {
            "weights": weights,
            "gradients": trained,
            "optimizer": 0 if spec.offloads_optimizer else 2 * trained,
            "EMA weights": trained if spec.has_ema else 0,
            "reference": reference_copies * weights,
        }
        return {name: per_rank(size, spec.sharding) for name, size in parts.items()}

    def host_bytes(self, spec: StepSpec) -> dict[str, int]:
        """What a rank holds on the host: trained weights, moments and averages while a checkpoint is written."""
        trained = per_rank(self.trained_params * self.trained_dtype_bytes, spec.sharding)
        moments = 2 * trained if spec.offloads_optimizer else 0
        return drop_zero({"optimizer": moments, "checkpoint": trained * (4 if spec.has_ema else 3)})

    def optimizer_temporaries(self, spec: StepSpec) -> int:
        """Intermediate results of AdamW's step: one number for every parameter, or none where it is fused."""
        none = spec.fused_optimizer or spec.offloads_optimizer
        return 0 if none else per_rank(self.trained_params * self.trained_dtype_bytes, spec.sharding)

    def stage_bytes(
        self, spec: StepSpec, persistent: BytesByPart, rollout: Sequence[BytesByPart], update: PassPeaks
    ) -> StageBytes:
        """The peaks of both stages, on top of what persists, from the candidates for each."""
        temporaries, sharding = self.optimizer_temporaries(spec), spec.sharding
        if sharding is None:
            candidates = [*update.at_root, *update.in_blocks]
            buffer = (
                min(persistent["gradients"], self.trained_dtype_bytes * BUCKET_NUMEL) if spec.shape.ranks > 1 else 0
            )
            after_backward = [{"optimizer temporaries": temporaries}, {EXCHANGE_BUFFERS: buffer}]
            return StageBytes(
                peak_of_rollout(persistent, rollout),
                peak_of_update(persistent, candidates, _largest(after_backward), one_pass=update.one_backward),
                self.host_bytes(spec),
            )
        units = self._units
        step = {"gradients": persistent["gradients"], "optimizer temporaries": temporaries}
        candidates = [*self._sharded_peaks(units, sharding, persistent["gradients"], update), step]
        return StageBytes(
            peak_of_rollout(persistent, units.in_rollout(sharding.rollout, rollout)),
            drop_zero({**persistent, **_largest(candidates)}),
            self.host_bytes(spec),
        )

    def _sharded_peaks(
        self, units: ShardUnits, sharding: Sharding, cut: int, update: PassPeaks
    ) -> Iterator[BytesByPart]:
        """Candidates for the peak of a pass, each with the gradients held then; `cut` are a rank's of all parameters.

        In a step of one backward pass, cut gradients come as activations are freed.
        """
        sums_uncut = sharding.exchange == "update" and not update.one_backward
        held = self.trained_params * self.trained_dtype_bytes if sums_uncut else cut
        before = 0 if update.one_backward else held
        yield {"gradients": before, **units.at_start()}
        for candidate in update.at_root:
            yield {"gradients": before, **units.at_root(), **candidate}
        for candidate in update.in_blocks:
            if update.one_backward:
                exchanged = per_rank(units.cut_before_last_block * self.trained_dtype_bytes, sharding)
                held = max(0, exchanged - candidate.get("activations", 0))
            yield {"gradients": held, **units.in_last_block(sharding, sums_uncut=sums_uncut), **candidate}
            if not sums_uncut:
                left = candidate.get("activations", 0) - update.freed_per_block
                yield {"gradients": held, **units.in_block_before(), **candidate, "activations": left}
        yield {"gradients": cut, **units.at_end(sums_uncut=sums_uncut)}

    @property
    def _units(self) -> ShardUnits:
        root, number = UnitParams(self.frozen_params, self.trained_params), self.trained_dtype_bytes
        return self.units or ShardUnits(UnitParams(), root, root.total, root.trained, number, number)


@dataclass(frozen=True)
class PassPeaks:
    """Candidates for the peak of a pass with its backward pass, by what a sharded model has gathered then."""

    in_blocks: Sequence[BytesByPart]
    at_root: Sequence[BytesByPart] = ()
    """Behind the last block, as at the head."""
    one_backward: bool = False
    """A step has one backward pass alone."""
    freed_per_block: int = 0
    """Activations that the backward pass of a block frees."""


def peak_of_rollout(persistent: BytesByPart, candidates: Sequence[BytesByPart]) -> dict[str, int]:
    """The largest of the candidates, on top of what persists: all but the gradients."""
    without_gradients = {name: size for name, size in persistent.items() if name != "gradients"}
    return drop_zero({**without_gradients, **_largest(candidates)})


def peak_of_update(
    persistent: BytesByPart, candidates: Sequence[BytesByPart], after_backward: BytesByPart, *, one_pass: bool
) -> dict[str, int]:
    """The peak of an update: the largest of its passes' candidates, or what follows them, with all gradients.

    In a step of one pass, gradients are made while activations are freed: only the larger of the two is held.
    """
    candidate = _largest(candidates)
    activations, gradients = sum(candidate.values()), persistent["gradients"]
    held_gradients = max(0, gradients - activations) if one_pass else gradients
    if held_gradients + activations >= gradients + sum(after_backward.values()):
        return drop_zero({**persistent, "gradients": held_gradients, **candidate})
    return drop_zero({**persistent, **after_backward})


def drop_zero(parts: BytesByPart) -> dict[str, int]:
    return {name: size for name, size in parts.items() if size}


def _largest(candidates: Sequence[BytesByPart]) -> BytesByPart:
    return max(candidates, key=lambda parts: sum(parts.values()))


def _with_margin(parts: BytesByPart) -> BytesByPart:
    margin = FRAMEWORK_MARGIN_BYTES + int(FRAMEWORK_MARGIN_SHARE * sum(parts.values()))
    return {**parts, FRAMEWORK_PART: margin}
