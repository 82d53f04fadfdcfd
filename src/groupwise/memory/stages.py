"""What memory is made of: named parts, for the rollout and for the update apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from groupwise.core.shape import StepShape

BytesByPart = Mapping[str, int]
FRAMEWORK_PART = "framework (margin)"
MARGIN_BYTES, MARGIN_SHARE = 512 << 20, 0.05
"""What an accelerator's context, workspaces and fragmentation add: assumed, not derived."""


@dataclass(frozen=True)
class StepSpec:
    """The numbers of a run that decide its memory, whatever is trained."""

    shape: StepShape
    kl: bool = False
    ema: bool = False
    sharded: bool = False
    """Weights, gradients and optimizer divided over the ranks (FSDP)."""
    fused: bool = False
    """AdamW's step holds no results of its own, as on CPU and CUDA. False also while the device is not known."""

    @property
    def shards(self) -> int:
        return self.shape.ranks if self.sharded else 1

    def prompts_in(self, rows: int) -> int:
        """Most different conditions in a pass of so many rows: few where a group stays on one rank.

        A pass begins at a multiple of gcd(rows, group_size) inside a group, at worst so many rows before its end.
        """
        shape = self.shape
        if shape.placement != "whole":
            return min(rows, shape.conditions_per_step)
        begins_at = shape.group_size - math.gcd(rows, shape.group_size)
        return min(-(-(begins_at + rows) // shape.group_size), shape.conditions_per_step // shape.ranks)


@dataclass(frozen=True)
class StageBytes:
    """Bytes by part at the fullest moment of each stage. A stage's parts add up to its peak."""

    rollout: BytesByPart
    update: BytesByPart

    @property
    def peak(self) -> int:
        return max(sum(self.rollout.values()), sum(self.update.values()))

    @property
    def fullest(self) -> str:
        return "rollout" if sum(self.rollout.values()) > sum(self.update.values()) else "update"

    def with_margin(self) -> StageBytes:
        """With what the framework of an accelerator adds."""
        return StageBytes(_with_margin(self.rollout), _with_margin(self.update))

    def plain(self) -> dict[str, dict[str, int]]:
        return {"rollout": dict(self.rollout), "update": dict(self.update)}


def _with_margin(parts: BytesByPart) -> BytesByPart:
    return {**parts, FRAMEWORK_PART: MARGIN_BYTES + int(MARGIN_SHARE * sum(parts.values()))}


def drop_zero(parts: BytesByPart) -> dict[str, int]:
    """Only the parts that take something."""
    return {name: size for name, size in parts.items() if size}


@dataclass(frozen=True)
class WeightBytes:
    """Weights in memory, and what training them adds."""

    frozen: int
    """Numbers that are not trained."""
    trained: int
    frozen_bytes: int = 4
    """Of one number."""
    trained_bytes: int = 4

    def parts(self, job: StepSpec, *, reference_copies: int = 0) -> dict[str, int]:
        """AdamW holds two moments of every trained number, in the number's own format."""
        trained, frozen = self.trained * self.trained_bytes, self.frozen * self.frozen_bytes
        whole = {
            "weights": frozen + trained,
            "gradients": trained,
            "optimizer": 2 * trained,
            "averaged weights": trained if job.ema else 0,
            "reference": reference_copies * (frozen + trained),
        }
        return {name: -(-size // job.shards) for name, size in whole.items()}

    def in_step(self, job: StepSpec) -> int:
        """Intermediate results of AdamW's step: one for every number, or none where it is fused."""
        return 0 if job.fused else -(-self.trained * self.trained_bytes // job.shards)


def peak_of_update(
    held: dict[str, int], moments: Sequence[BytesByPart], in_step: int, *, one_pass: bool
) -> dict[str, int]:
    """The fullest moment of an update: of its passes, or of the optimizer's step.

    In a step of one pass, gradients come while activations go: only what is larger is held at a time.
    """
    moment = max(moments, key=lambda parts: sum(parts.values()))
    kept = max(0, held["gradients"] - sum(moment.values())) if one_pass else held["gradients"]
    if kept + sum(moment.values()) >= held["gradients"] + in_step:
        return {**held, "gradients": kept, **moment}
    return {**held, "optimizer's results": in_step}
