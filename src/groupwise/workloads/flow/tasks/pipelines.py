"""Flow models from pipeline folders, conditions from disk, rewards by name. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from groupwise.core.errors import UserError
from groupwise.data.rows import OnBadRow, RowFilter, format_counts
from groupwise.rewards.config import RewardFunctionsConfig
from groupwise.workloads.flow.config import FlowConfig, TrainConfig
from groupwise.workloads.flow.memory import FlowMemory, read_video_config, read_video_model
from groupwise.workloads.flow.sampling.schedule import window_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from groupwise.memory.stages import StepSpec
    from groupwise.workloads.flow.models.base import FlowModel
    from groupwise.workloads.flow.task import Condition, FlowTask


@dataclass(frozen=True)
class PipelineConfig(FlowConfig):
    """A transformer from a pipeline folder."""

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
    """Of what is generated, in pixels."""
    width: int = 512
    """Of what is generated, in pixels."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the frozen weights and the passes; steps, log-probabilities and adapters are float32."""
    negative_prompt: str = ""
    """What guidance leads away from."""
    train: TrainConfig = field(default_factory=TrainConfig)

    def model(self, folder: Path, device: torch.device) -> FlowModel:
        raise NotImplementedError(f"{type(self).__name__} must define model(folder, device)")

    def task(self, device: torch.device) -> FlowTask:
        from groupwise.rewards.load import load_reward_functions
        from groupwise.workloads.flow.task import FlowTask

        for name in ("pipeline", "data"):
            if getattr(self, name) is None:
                raise UserError(f"workload.{name} is not given: this recipe needs it. Say --workload.{name} PATH.")
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
        from groupwise.workloads.flow.data import read_conditions

        row_filter = RowFilter(self.on_bad_row, "--workload.on-bad-row")
        conditions = read_conditions(str(getattr(self, name)), row_filter, size=(self.height, self.width))
        if row_filter.skipped:
            notes.append(f"rows of {name} skipped: {format_counts(row_filter.skipped)}; {len(conditions)} are left")
        return conditions


@dataclass(frozen=True)
class RecamConfig(PipelineConfig):
    """Wan with camera layers: a source clip seen along another camera path."""

    frames: int = 81
    """Of what is generated; the VAE makes (frames - 1) / 4 + 1 latent frames of them, and so many poses are needed."""
    height: int = 480
    """Of what is generated, in pixels."""
    width: int = 832
    """Of what is generated, in pixels."""
    camera_layers: Path | None = None
    """Camera layers that were trained before (safetensors); None begins with layers that change nothing."""

    def memory_model(self) -> FlowMemory:
        """By the transformer's config.json. Text encoder and VAE visit the device one at a time: not planned."""
        if self.pipeline is None:
            raise UserError("workload.pipeline is not given: a plan needs its transformer's config.json.")
        latent = (16, (self.frames - 1) // 4 + 1, self.height // 8, self.width // 8)
        return FlowMemory(
            read_video_model(self.pipeline),
            latent,
            len(window_at(self.sampling, 0)),
            pixels=3 * self.frames * self.height * self.width,
            guided=self.sampling.guidance != 1,
            branch=self.sampling.branch,
            decode_rows=self.encode_rows_per_pass,
            checkpointing=self.gradient_checkpointing,
            lora_rank=self.train.lora_rank if self.train.part == "lora" else None,
            camera_only=self.train.part == "camera",
            number_bytes=2 if self.dtype == "bfloat16" else 4,
            stored_bytes=2 if self.sampling.storage == "bfloat16" else 4,
        )

    def trace_memory(self, spec: StepSpec) -> Mapping[str, int]:
        from groupwise.workloads.flow.trace import traced_flow

        memory = self.memory_model()
        assert self.pipeline is not None
        return traced_flow(read_video_config(self.pipeline), self.train, memory, spec)

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
    """Stable Diffusion 3: a prompt into a picture."""

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
