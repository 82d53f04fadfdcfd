"""The embedded flow task as a config. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from groupwise.core.errors import require
from groupwise.workloads.flow.config import FlowConfig, TrainConfig
from groupwise.workloads.flow.memory import FlowMemory, read_video_config, read_video_model
from groupwise.workloads.flow.sampling.schedule import window_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from groupwise.memory.stages import StepSpec
    from groupwise.workloads.flow.task import FlowTask

CLIP, PROMPT_WORDS = (3, 5, 8, 8), 2
"""Colors, frames, height and width of a clip, and words of a prompt."""
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

    def memory_model(self) -> FlowMemory:
        """All weights are trained, pixels are the latents, and the first weights are kept as a reference."""
        return FlowMemory(
            read_video_model(self._folder),
            CLIP,
            len(window_at(self.sampling, 0)),
            text_tokens=PROMPT_WORDS,
            guided=self.sampling.guidance != 1,
            branch=self.sampling.branch,
            decode_rows=self.encode_rows_per_pass,
            checkpointing=self.gradient_checkpointing,
            stored_bytes=2 if self.sampling.storage == "bfloat16" else 4,
        )

    def trace_memory(self, spec: StepSpec) -> Mapping[str, int]:
        from groupwise.workloads.flow.trace import traced_flow

        return traced_flow(read_video_config(self._folder), TrainConfig(part="all"), self.memory_model(), spec)

    @property
    def _folder(self) -> Path:
        return Path(__file__).parent / "asset" if self.model is None else self.model

    def task(self, device: torch.device) -> FlowTask:
        from groupwise.workloads.flow.tasks.plane.task import plane_task

        return plane_task(self, device)
