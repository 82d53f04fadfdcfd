"""The embedded flow task as a config. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from groupwise.core.errors import require
from groupwise.workloads.flow.config import FlowConfig

if TYPE_CHECKING:
    import torch

    from groupwise.workloads.flow.task import FlowTask

WEIGHTS = {"camera": 0.6, "quality": 0.4}
"""What a clip is worth: mostly whether the camera went where it was asked to."""


@dataclass(frozen=True)
class PlaneConfig(FlowConfig):
    """Clips of textured planes along a camera path, by the model that is shipped with the package."""

    scenes: int = 256
    """Conditions to train on: each a scene, a source clip, a camera path and a prompt."""
    held_out_scenes: int = 48
    """Conditions that are only evaluated."""
    model: Path | None = None
    """Folder of another model made by scripts/pretrain_flow.py; None for the one that is shipped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("scenes", "held_out_scenes"):
            require(getattr(self, name) >= 1, f"workload.{name}", getattr(self, name), "at least 1")

    def task(self, device: torch.device) -> FlowTask:
        from groupwise.workloads.flow.plane.task import plane_task

        return plane_task(self, device)
