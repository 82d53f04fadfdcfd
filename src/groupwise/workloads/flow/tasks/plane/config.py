"""PlaneConfig: the embedded flow task, and the sizes of its clips. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from groupwise.core.errors import require
from groupwise.workloads.flow.config import FlowConfig, TrainedPartsConfig
from groupwise.workloads.flow.memory import FlowMemory, read_transformer_config, read_wan_architecture
from groupwise.workloads.flow.sampling.schedule import window_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from groupwise.memory.stages import StepSpec
    from groupwise.workloads.flow.task import FlowTask

COLORS, FRAMES, SIDE, PROMPT_WORDS = 3, 5, 8, 2
"""Sizes of a clip, and words of a prompt."""
ASSET = Path(__file__).parent / "asset"
"""Folder of the embedded model."""
WEIGHTS = {"camera": 0.6, "quality": 0.4}
"""Weights of the rewards: mostly whether the camera follows the requested path."""


@dataclass(frozen=True)
class PlaneConfig(FlowConfig):
    """Clips of textured planes along a camera path, by the embedded model."""

    scenes: int = 256
    """Conditions to train on: each a scene, a source clip, a camera path and a prompt."""
    held_out_scenes: int = 48
    """Conditions that are only evaluated."""
    model: Path | None = None
    """Folder of another model written by `python -m tools.plane`; None for the embedded one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("scenes", "held_out_scenes"):
            require(getattr(self, name) >= 1, f"workload.{name}", getattr(self, name), "at least 1")

    def memory_model(self) -> FlowMemory:
        """All weights are trained, latents are pixels, and the initial weights are kept as the reference."""
        return FlowMemory(
            read_wan_architecture(self.folder),
            (COLORS, FRAMES, SIDE, SIDE),
            len(window_at(self.sampling, 0)),
            text_tokens=PROMPT_WORDS,
            guided=self.sampling.guidance_scale != 1,
            shared_noise=self.sampling.shared_noise,
            decode_rows=self.encode_rows,
            checkpointing=self.gradient_checkpointing,
            storage_bytes=2 if self.sampling.latent_dtype == "bfloat16" else 4,
        )

    def trace_memory(self, spec: StepSpec) -> Mapping[str, int]:
        from groupwise.workloads.flow.trace import trace_flow

        return trace_flow(
            read_transformer_config(self.folder), TrainedPartsConfig(part="all"), self.memory_model(), spec
        )

    @property
    def folder(self) -> Path:
        """Of the model."""
        return self.model or ASSET

    def task(self, device: torch.device) -> FlowTask:
        from groupwise.workloads.flow.tasks.plane.task import plane_task

        return plane_task(self, device)
