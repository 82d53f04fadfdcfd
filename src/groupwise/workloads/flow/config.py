"""Settings of the flow workload: FlowConfig, and which part of the transformer is trained. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from groupwise.core.errors import UserError, require, require_types
from groupwise.workloads.base import MAX_LORA_RANK, WorkloadConfig
from groupwise.workloads.flow.sampling.schedule import MAX_STEPS, SamplingConfig

if TYPE_CHECKING:
    import torch

    from groupwise.workloads.flow.task import FlowTask
    from groupwise.workloads.flow.workload import FlowWorkload

MAX_CONDITIONS = 100_000
"""That a number in the settings of an embedded task asks for: they are made when a run starts, and held in memory."""


@dataclass(frozen=True)
class FlowConfig(WorkloadConfig):
    """A task subclasses it and defines `task`: the model, the conditions and the rewards."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    reference: bool = False
    """Score under the initial policy too, which costs a second pass: needed where loss.kl is above 0."""
    gradient_checkpointing: bool = False
    """Keep only the blocks' inputs for the backward pass and recompute the rest: less memory, the same result."""
    cached_conditions: int = 1024
    """Conditions whose encodings are kept in memory; the least recently used are encoded again when needed."""
    encode_rows: int = 4
    """Conditions that are encoded together, and clips that are decoded together. A memory setting: halved when memory
    runs out there."""
    eval_rows: int = 8
    """Held-out clips that are generated together. A memory setting."""
    eval_steps: int | None = None
    """Denoising steps of held-out clips; None for as many as in training. More of them show what users will see."""
    eval_seed: int = 0
    """Seed of the noise that held-out clips are generated from: the same before and after training."""

    def __post_init__(self) -> None:
        require_types(self, "workload.")
        for name in ("cached_conditions", "encode_rows", "eval_rows"):
            require(getattr(self, name) >= 1, f"workload.{name}", getattr(self, name), "at least 1")
        if self.eval_steps is not None:
            rule = f"from 2 to {MAX_STEPS:,}"
            require(2 <= self.eval_steps <= MAX_STEPS, "workload.eval_steps", self.eval_steps, rule)

    def task(self, device: torch.device) -> FlowTask:
        """The model, its conditions and its rewards; the same on every rank."""
        raise NotImplementedError(f"{type(self).__name__} must define task(device)")

    def build(self, device: torch.device) -> FlowWorkload:
        from groupwise.workloads.flow.workload import FlowWorkload

        return FlowWorkload(self.task(device), self, device)


@dataclass(frozen=True)
class TrainedPartsConfig:
    """Which weights of a transformer are trained; all others are frozen."""

    part: Literal["lora", "camera", "recam", "all"] = "lora"
    """A LoRA adapter on `lora_targets`; the camera layers only; these and self-attention, as ReCamMaster trained; or
    all weights."""
    lora_rank: int = 32
    """Rank of the adapter."""
    lora_alpha: int = 64
    """The adapter's output is scaled by alpha / rank."""
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0", "pose_encoder", "projector")
    """Linear layers that get an adapter, by the end of their names; names that the model does not have are ignored."""
    lora_seed: int = 0
    """Seed of the adapter's initial weights."""

    def __post_init__(self) -> None:
        require_types(self, "workload.train.")
        rule = f"from 1 to {MAX_LORA_RANK:,}"
        require(1 <= self.lora_rank <= MAX_LORA_RANK, "workload.train.lora_rank", self.lora_rank, rule)
        require(self.lora_alpha >= 1, "workload.train.lora_alpha", self.lora_alpha, "at least 1")

    def check_dtype(self, dtype: str) -> None:
        """Refuse to train weights of a transformer in half precision."""
        if self.part in ("recam", "all") and dtype not in ("float32", "float64"):
            raise UserError(
                f"workload.train.part is '{self.part}' and the transformer is in {dtype}: small updates would be"
                " rounded away. Take --workload.dtype float32, or train 'lora' or 'camera', which are kept in float32."
            )
