"""DiscsConfig: the embedded image task, and the sizes of its images. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from groupwise.core.errors import require
from groupwise.workloads.flow.config import MAX_CONDITIONS, FlowConfig, TrainedPartsConfig
from groupwise.workloads.flow.image_memory import image_architecture
from groupwise.workloads.flow.memory import FlowMemory, read_transformer_config
from groupwise.workloads.flow.sampling.schedule import window_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from groupwise.memory.stages import StepSpec
    from groupwise.workloads.flow.task import FlowTask

LATENT_CHANNELS, LATENT_SIDE, SCALE, PROMPT_WORDS = 3, 16, 3, 4
"""Sizes of the latents, how much larger the images are, and words of a prompt."""
SIDE = SCALE * LATENT_SIDE
"""Pixels of an image, across and down."""
ASSET = Path(__file__).parent / "asset"
"""Folder of the embedded model."""
WEIGHTS = {"count": 1 / 3, "color": 1 / 3, "place": 1 / 3}
"""Weights of the rewards."""
RewardKind = Literal["discs", "areas"]


@dataclass(frozen=True)
class DiscsConfig(FlowConfig):
    """Images of one to three discs by the embedded model."""

    images_per_prompt: int = 8
    """Conditions of each of the 27 prompts to train on; they differ in their noise."""
    held_out_images_per_prompt: int = 16
    """Conditions of each of the 9 prompts that are only evaluated: their combinations of words are not trained on."""
    reward: RewardKind = "discs"
    """What the rewards look at: discs, found by a matched filter; or areas of color, which can be cheated."""
    model: Path | None = None
    """Folder of another model written by `python -m tools.discs`; None for the embedded one."""
    train: TrainedPartsConfig = field(default_factory=TrainedPartsConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("images_per_prompt", "held_out_images_per_prompt"):
            value = getattr(self, name)
            require(1 <= value <= MAX_CONDITIONS, f"workload.{name}", value, f"from 1 to {MAX_CONDITIONS:,}")

    def memory_model(self) -> FlowMemory:
        """Decoding is not planned."""
        architecture = image_architecture(read_transformer_config(self.folder), str(self.folder))
        architecture.require_known(self.train.part, 4)
        return FlowMemory(
            architecture,
            (LATENT_CHANNELS, LATENT_SIDE, LATENT_SIDE),
            len(window_at(self.sampling, 0)),
            part=self.train.part,
            text_tokens=PROMPT_WORDS,
            guided=self.sampling.guidance_scale != 1,
            lora_rank=self.train.lora_rank,
            shared_noise=self.sampling.shared_noise,
            decode_rows=self.encode_rows,
            checkpointing=self.gradient_checkpointing,
            storage_bytes=2 if self.sampling.latent_dtype == "bfloat16" else 4,
        )

    def trace_memory(self, spec: StepSpec) -> Mapping[str, int]:
        from groupwise.workloads.flow.trace import trace_flow

        return trace_flow(read_transformer_config(self.folder), self.train, self.memory_model(), spec)

    @property
    def folder(self) -> Path:
        """Of the model."""
        return self.model or ASSET

    def task(self, device: torch.device) -> FlowTask:
        from groupwise.workloads.flow.tasks.discs.task import discs_task

        return discs_task(self, device)
