"""Tasks on models from pipeline folders (Wan with camera layers, Stable Diffusion 3), with conditions from files.

No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from groupwise.core.errors import UserError
from groupwise.data.rows import OnBadRow, RowFilter, format_counts
from groupwise.rewards.config import RewardFunctionsConfig
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
class PipelineConfig(FlowConfig):
    """A model from a pipeline folder, trained on conditions from a file."""

    pipeline: Path | None = None
    """Folder of the pipeline: transformer, text encoder, VAE."""
    data: Path | None = None
    """Conditions to train on, with prompts, videos and camera paths: a .jsonl or .parquet file, a folder that
    `datasets` saved, or module:function, which returns the rows."""
    held_out: Path | None = None
    """Conditions that are only evaluated, in the same forms; None for none."""
    on_bad_row: OnBadRow = "refuse"
    """A broken line, a missing prompt, a video or camera path that cannot be read: refuse the file, or skip such rows,
    counted and shown before training."""
    rewards: RewardFunctionsConfig = field(default_factory=RewardFunctionsConfig)
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
        from groupwise.rewards.load import load_reward_functions
        from groupwise.workloads.flow.task import FlowTask

        for name in ("pipeline", "data"):
            if getattr(self, name) is None:
                raise UserError(f"workload.{name} is not given, and this recipe needs it. Add --workload.{name} PATH.")
        assert self.pipeline is not None
        assert self.data is not None
        rewards = load_reward_functions(self.rewards)
        notes: list[str] = []
        return FlowTask(
            model=self.model(self.pipeline, device),
            conditions=self._read("data", notes),
            held_out=self._read("held_out", notes) if self.held_out else [],
            rewards=rewards,
            notes=notes,
        )

    def _read(self, name: Literal["data", "held_out"], notes: list[str]) -> list[Condition]:
        from groupwise.workloads.flow.data import ClipFormat, read_conditions

        row_filter = RowFilter(self.on_bad_row, "--workload.on-bad-row")
        clips = ClipFormat((self.height, self.width), getattr(self, "frames", None))
        conditions = read_conditions(str(getattr(self, name)), row_filter, clips)
        if row_filter.skipped:
            notes.append(f"rows of {name} skipped: {format_counts(row_filter.skipped)}; {len(conditions)} are left")
        return conditions


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
            decode_rows=self.encode_rows,
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
