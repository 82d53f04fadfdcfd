"""Tasks on models from pipeline folders (Wan with camera layers, Stable Diffusion 3), with conditions from files.

No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from groupwise.core.errors import UserError, require
from groupwise.workloads.flow.config import FlowConfig, TrainedPartsConfig
from groupwise.workloads.flow.memory import FlowMemory, read_transformer_config, read_wan_architecture
from groupwise.workloads.flow.sampling.schedule import window_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from groupwise.memory.stages import StepSpec
    from groupwise.workloads.flow.models.base import FlowModel
    from groupwise.workloads.flow.task import Condition, FlowTask


@dataclass(frozen=True)
class ServiceConfig:
    """How reward services are called."""

    timeout_s: float = 60.0
    """Longest wait for one answer."""
    retries: int = 2
    """Tries after the first."""
    rows_per_request: int = 8
    """Clips that are sent together."""

    def __post_init__(self) -> None:
        require(self.timeout_s > 0, "workload.service.timeout_s", self.timeout_s, "above 0")
        require(self.retries >= 0, "workload.service.retries", self.retries, "0 or more")
        require(self.rows_per_request >= 1, "workload.service.rows_per_request", self.rows_per_request, "at least 1")


@dataclass(frozen=True)
class PipelineConfig(FlowConfig):
    """A model from a pipeline folder, trained on conditions from a file."""

    pipeline: Path | None = None
    """Folder of the pipeline: transformer, text encoder, VAE."""
    data: Path | None = None
    """Conditions to train on: a JSONL file of prompts, videos and camera paths."""
    held_out: Path | None = None
    """Conditions that are only evaluated; None for none."""
    rewards: tuple[str, ...] = ()
    """name=module:function in process, or name=http://host/path as a service; any number of them."""
    service: ServiceConfig = field(default_factory=ServiceConfig)
    height: int = 512
    """Height of the generated images or clips, in pixels."""
    width: int = 512
    """Width of the generated images or clips, in pixels."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the frozen weights and their computations; denoising steps, log-probs and trained weights are float32."""
    negative_prompt: str = ""
    """The prompt that guidance leads away from."""
    train: TrainedPartsConfig = field(default_factory=TrainedPartsConfig)

    def model(self, folder: Path, device: torch.device) -> FlowModel:
        raise NotImplementedError(f"{type(self).__name__} must define model(folder, device)")

    def task(self, device: torch.device) -> FlowTask:
        from groupwise.rewards.http import HttpReward
        from groupwise.rewards.load import named_rewards
        from groupwise.workloads.flow.task import FlowTask

        for name in ("pipeline", "data"):
            if getattr(self, name) is None:
                raise UserError(f"workload.{name} is not given, and this recipe needs it. Add --workload.{name} PATH.")
        assert self.pipeline is not None
        assert self.data is not None
        given = {name: getattr(self.service, name) for name in ("timeout_s", "retries", "rows_per_request")}
        rewards = named_rewards(self.rewards, HttpReward("", **given))
        return FlowTask(
            model=self.model(self.pipeline, device),
            conditions=self._read(self.data),
            held_out=self._read(self.held_out) if self.held_out else [],
            rewards=rewards,
        )

    def _read(self, path: Path) -> list[Condition]:
        from groupwise.workloads.flow.data import read_conditions

        return read_conditions(path, size=(self.height, self.width))


@dataclass(frozen=True)
class RecamConfig(PipelineConfig):
    """Wan with camera layers: a source clip shown along another camera path."""

    frames: int = 81
    """Frames of the generated clips. The VAE makes (frames - 1) / 4 + 1 latent frames of them; a camera path has one
    pose for each of those."""
    height: int = 480
    """Height of the generated clips, in pixels."""
    width: int = 832
    """Width of the generated clips, in pixels."""
    camera_layers: Path | None = None
    """Trained camera layers (safetensors); None starts from layers that leave the base model unchanged."""

    def memory_model(self) -> FlowMemory:
        """From the transformer's config.json. Text encoder and VAE, on the device one at a time, are not planned."""
        if self.pipeline is None:
            raise UserError("workload.pipeline is not given: a plan needs its transformer's config.json.")
        latent = (16, (self.frames - 1) // 4 + 1, self.height // 8, self.width // 8)
        return FlowMemory(
            read_wan_architecture(self.pipeline),
            latent,
            len(window_at(self.sampling, 0)),
            pixels=3 * self.frames * self.height * self.width,
            guided=self.sampling.guidance_scale != 1,
            shared_noise=self.sampling.shared_noise,
            decode_rows=self.encode_rows_per_pass,
            checkpointing=self.gradient_checkpointing,
            lora_rank=self.train.lora_rank if self.train.part == "lora" else None,
            camera_only=self.train.part == "camera",
            dtype_bytes=2 if self.dtype == "bfloat16" else 4,
            storage_bytes=2 if self.sampling.latent_dtype == "bfloat16" else 4,
        )

    def trace_memory(self, spec: StepSpec) -> Mapping[str, int]:
        from groupwise.workloads.flow.trace import trace_flow

        memory = self.memory_model()
        assert self.pipeline is not None
        return trace_flow(read_transformer_config(self.pipeline), self.train, memory, spec)

    def model(self, folder: Path, device: torch.device) -> FlowModel:
        from groupwise.workloads.flow.models.wan import ClipSize, WanCameraModel

        return WanCameraModel(
            folder,
            ClipSize(self.frames, self.height, self.width),
            train=self.train,
            device=device,
            dtype=self.dtype,
            negative_prompt=self.negative_prompt,
            camera_layers=self.camera_layers,
        )


@dataclass(frozen=True)
class Sd3Config(PipelineConfig):
    """Stable Diffusion 3: images from prompts."""

    def model(self, folder: Path, device: torch.device) -> FlowModel:
        from groupwise.workloads.flow.models.sd3 import Sd3Model

        return Sd3Model(
            folder,
            (self.height, self.width),
            train=self.train,
            device=device,
            dtype=self.dtype,
            negative_prompt=self.negative_prompt,
        )
