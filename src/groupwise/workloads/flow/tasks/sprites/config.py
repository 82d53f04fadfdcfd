"""SpritesConfig: the embedded flow task, and the sizes of its clips. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from groupwise.core.errors import require
from groupwise.workloads.flow.config import MAX_CONDITIONS, FlowConfig, TrainedPartsConfig
from groupwise.workloads.flow.memory import FlowMemory, read_transformer_config, read_wan_architecture
from groupwise.workloads.flow.sampling.schedule import window_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from groupwise.memory.stages import StepSpec
    from groupwise.workloads.flow.task import FlowTask

FRAMES, LATENT_CHANNELS, LATENT_SIDE, SCALE, PROMPT_WORDS = 8, 7, 12, 4, 2
"""Sizes of the latents, how much larger the pictures are, and words of a prompt."""
SIDE = SCALE * LATENT_SIDE
"""Pixels of a frame, across and down."""
_NUMBERS_PER_PIXEL = 12
"""While the fixed decoder paints: half of them, since the plan counts the numbers of a clip twice."""
ASSET = Path(__file__).parent / "asset"
"""Folder of the embedded models."""
WEIGHTS = {"camera": 0.5, "quality": 0.5}
"""Weights of the rewards. Those of a group differ mostly in `camera`: with a smaller weight quality would be lost."""


@dataclass(frozen=True)
class SpritesConfig(FlowConfig):
    """Clips of three sprites on a floor along a camera path, by the embedded model."""

    scenes: int = 512
    """Conditions to train on: each a scene, its source picture, a camera path and a prompt."""
    held_out_scenes: int = 96
    """Conditions that are only evaluated, before and after training."""
    final_scenes: int = 480
    """Conditions that only `groupwise eval` uses, to compare the model with others."""
    model: Path | None = None
    """Folder of another model written by `python -m tools.sprites`; None for the embedded one."""
    train: TrainedPartsConfig = field(default_factory=lambda: TrainedPartsConfig(part="camera"))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("scenes", "held_out_scenes", "final_scenes"):
            value = getattr(self, name)
            require(1 <= value <= MAX_CONDITIONS, f"workload.{name}", value, f"from 1 to {MAX_CONDITIONS:,}")

    def memory_model(self) -> FlowMemory:
        """The initial weights of what is trained are kept as the reference."""
        return FlowMemory(
            replace(read_wan_architecture(self.folder), source_frames=1),
            (LATENT_CHANNELS, FRAMES, LATENT_SIDE, LATENT_SIDE),
            len(window_at(self.sampling, 0)),
            text_tokens=PROMPT_WORDS,
            guided=self.sampling.guidance_scale != 1,
            shared_noise=self.sampling.shared_noise,
            decode_rows=self.encode_rows,
            pixels=_NUMBERS_PER_PIXEL * FRAMES * SIDE * SIDE,
            checkpointing=self.gradient_checkpointing,
            part=self.train.part,
            lora_rank=self.train.lora_rank,
            storage_bytes=2 if self.sampling.latent_dtype == "bfloat16" else 4,
        )

    def trace_memory(self, spec: StepSpec) -> Mapping[str, int]:
        from groupwise.workloads.flow.trace import trace_flow

        return trace_flow(read_transformer_config(self.folder), self.train, self.memory_model(), spec)

    @property
    def folder(self) -> Path:
        """Of the model."""
        return self.model or ASSET / "base"

    def task(self, device: torch.device) -> FlowTask:
        from groupwise.workloads.flow.tasks.sprites.task import sprites_task

        return sprites_task(self, device)
