"""Which part of a transformer is trained. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from groupwise.core.errors import require, require_types


@dataclass(frozen=True)
class TrainConfig:
    part: Literal["lora", "camera", "all"] = "lora"
    """A LoRA adapter on the linear layers below; the camera layers alone; or every weight."""
    lora_rank: int = 32
    """Width of the adapter."""
    lora_alpha: int = 64
    """The adapter's output is scaled by alpha / rank."""
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0", "pose_encoder", "projector")
    """Linear layers that get an adapter, by the end of their names; those that a model lacks are passed over."""
    lora_seed: int = 0
    """Decides the adapter's first weights."""

    def __post_init__(self) -> None:
        require_types(self, "workload.train.")
        require(self.lora_rank >= 1, "workload.train.lora_rank", self.lora_rank, "at least 1")
        require(self.lora_alpha >= 1, "workload.train.lora_alpha", self.lora_alpha, "at least 1")
