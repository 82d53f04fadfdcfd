"""Tasks on models from pipeline folders (Wan, Wan with camera layers, image models), with conditions from files.

No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from groupwise.core.errors import UserError, require
from groupwise.core.io.files import cache_folder, parse_json
from groupwise.data.rows import OnBadRow, RowFilter, format_counts
from groupwise.rewards.config import RewardFunctionsConfig
from groupwise.workloads.flow.config import FlowConfig, TrainedPartsConfig
from groupwise.workloads.flow.image_memory import image_architecture
from groupwise.workloads.flow.memory import FlowMemory, read_transformer_config, read_wan_architecture
from groupwise.workloads.flow.sampling.schedule import window_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from groupwise.memory.stages import StepSpec
    from groupwise.workloads.flow.models.base import FlowModel
    from groupwise.workloads.flow.task import Condition, FlowTask

_IMAGE_TEXT_TOKENS = {"sd3": 256, "flux": 512, "qwen-image": 512}
"""Tokens of a prompt as the pipelines encode it; before the 256 of T5, Stable Diffusion 3 has those of CLIP."""


@dataclass(frozen=True)
class PipelineConfig(FlowConfig):
    """A model from a pipeline folder, trained on conditions from a file."""

    gradient_checkpointing: bool = True
    """Keep only the blocks' inputs for the backward pass and recompute the rest: less memory, the same result."""
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
    encoding_cache_gib: float = 50.0
    """Encoded prompts and source clips that are kept on the disk for all ranks and runs, in $GROUPWISE_CACHE (else
    ~/.cache/groupwise); those not used for longest are deleted. 0 keeps none."""
    negative_prompt: str = ""
    """The prompt that guidance leads away from."""
    train: TrainedPartsConfig = field(default_factory=TrainedPartsConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("height", "width"):
            require(getattr(self, name) >= 1, f"workload.{name}", getattr(self, name), "at least 1")
        self.train.check_dtype(self.dtype)
        gib = self.encoding_cache_gib
        require(0 <= gib <= 2**20, "workload.encoding_cache_gib", gib, "from 0 (none) to 1048576")

    @property
    def num_frames(self) -> int | None:
        """Of a clip; None for images."""
        return None

    def model(self, folder: Path, device: torch.device) -> FlowModel:
        raise NotImplementedError(f"{type(self).__name__} must define model(folder, device)")

    def memory_model(self) -> FlowMemory:
        raise NotImplementedError(f"{type(self).__name__} must define memory_model()")

    def trace_memory(self, spec: StepSpec) -> Mapping[str, int]:
        from groupwise.workloads.flow.trace import trace_flow

        return trace_flow(read_transformer_config(_given(self.pipeline)), self.train, self.memory_model(), spec)

    def _model_settings(self, device: torch.device) -> dict[str, Any]:
        return {"train": self.train, "device": device, "dtype": self.dtype, "negative_prompt": self.negative_prompt}

    def task(self, device: torch.device) -> FlowTask:
        from groupwise.rewards.load import load_reward_functions
        from groupwise.workloads.flow.data.images import draw_movie, draw_sheet
        from groupwise.workloads.flow.sampling.encoding_store import EncodingStore
        from groupwise.workloads.flow.task import FlowTask

        for name in ("pipeline", "data"):
            if getattr(self, name) is None:
                raise UserError(f"workload.{name} is not given, and this recipe needs it. Add --workload.{name} PATH.")
        assert self.pipeline is not None
        assert self.data is not None
        rewards = load_reward_functions(self.rewards)
        is_video = self.num_frames is not None
        notes: list[str] = []
        model = self.model(self.pipeline, device)
        if self.encoding_cache_gib:
            model.encoding_store = EncodingStore(cache_folder() / "encodings", int(self.encoding_cache_gib * 2**30))
        return FlowTask(
            model=model,
            conditions=self._read("data", notes),
            held_out=self._read("held_out", notes) if self.held_out else [],
            rewards=rewards,
            images={"clips.png": draw_sheet, "clips.gif": draw_movie} if is_video else {"images.png": draw_sheet},
            num_images=2 if is_video else 8,
            notes=notes,
        )

    def _read(self, name: Literal["data", "held_out"], notes: list[str]) -> list[Condition]:
        from groupwise.workloads.flow.data.clips import ClipFormat
        from groupwise.workloads.flow.data.rows import read_conditions

        row_filter = RowFilter(self.on_bad_row, "--workload.on-bad-row")
        clips = ClipFormat((self.height, self.width), self.num_frames)
        conditions = read_conditions(str(getattr(self, name)), row_filter, clips)
        if row_filter.skipped:
            notes.append(f"rows of {name} skipped: {format_counts(row_filter.skipped)}; {len(conditions)} are left")
        return conditions


@dataclass(frozen=True)
class ClipConfig(PipelineConfig):
    """A pipeline of Wan."""

    frames: int = 81
    """Frames of the generated clips: 1 + a multiple of 4, of which the VAE makes (frames - 1) / 4 + 1 latent frames.
    Camera paths have one pose for each of those."""
    height: int = 480
    """Height of the generated clips, in pixels."""
    width: int = 832
    """Width of the generated clips, in pixels."""

    has_camera_layers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.frames >= 1, "workload.frames", self.frames, "at least 1")

    @property
    def num_frames(self) -> int:
        return self.frames

    def memory_model(self) -> FlowMemory:
        """From the transformer's config.json. Text encoder and VAE, on the device one at a time, are not planned."""
        folder = _given(self.pipeline)
        architecture = read_wan_architecture(folder, camera_layers=self.has_camera_layers)
        channels, (frames, side) = architecture.out_channels or architecture.channels, _vae_factors(folder)
        return FlowMemory(
            architecture,
            (channels, (self.frames - 1) // frames + 1, self.height // side, self.width // side),
            pixels=3 * self.frames * self.height * self.width,
            guided_together=False,
            transformers=1 + (folder / "transformer_2" / "config.json").is_file(),
            **_memory_settings(self),
        )


@dataclass(frozen=True)
class WanConfig(ClipConfig):
    """Wan 2.1 and 2.2: clips from prompts, or from prompts and an image (the row's `video`)."""

    low_noise_guidance_scale: float | None = None
    """Guidance of Wan 2.2's transformer for low noise levels; None for sampling.guidance_scale."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low_noise_guidance_scale is not None:
            scale, rule = self.sampling.guidance_scale, "other than 1 where workload.low_noise_guidance_scale is given"
            require(scale != 1, "workload.sampling.guidance_scale", scale, rule)

    def model(self, folder: Path, device: torch.device) -> FlowModel:
        from groupwise.workloads.flow.models.wan import ClipSize, WanModel

        size, own = ClipSize(self.frames, self.height, self.width), self.low_noise_guidance_scale
        return WanModel(folder, size, low_noise_guidance_scale=own, **self._model_settings(device))


@dataclass(frozen=True)
class RecamConfig(ClipConfig):
    """Wan with camera layers: a source clip shown along another camera path."""

    camera_layers: Path | None = None
    """Trained camera layers: ReCamMaster's .ckpt, a .safetensors file, the recam.ckpt of `groupwise export`, or a
    checkpoint folder of a run without LoRA; None starts from layers that leave the base model unchanged."""

    has_camera_layers: ClassVar[bool] = True

    def model(self, folder: Path, device: torch.device) -> FlowModel:
        from groupwise.workloads.flow.models.wan import ClipSize, WanCameraModel

        size = ClipSize(self.frames, self.height, self.width)
        return WanCameraModel(folder, size, camera_layers=self.camera_layers, **self._model_settings(device))


@dataclass(frozen=True)
class ImageConfig(PipelineConfig):
    """Images from prompts: Stable Diffusion 3, Flux.1 or Qwen-Image, whichever the folder holds."""

    guidance_embedding: float = 3.5
    """Flux.1-dev's guidance scale, an input of its transformer. sampling.guidance_scale is the pipeline's
    true_cfg_scale."""

    def memory_model(self) -> FlowMemory:
        """From the transformer's config.json. Text encoders and VAE, on the device one at a time, are not planned."""
        folder = _given(self.pipeline)
        architecture = image_architecture(read_transformer_config(folder), str(folder))
        architecture.require_known(self.train.part, 2 if self.dtype == "bfloat16" else 4)
        channels, (_, factor) = architecture.token_out // 4, _vae_factors(folder)
        return FlowMemory(
            architecture,
            (channels, self.height // factor, self.width // factor),
            pixels=3 * self.height * self.width,
            text_tokens=_IMAGE_TEXT_TOKENS[architecture.model]
            + (_clip_tokens(folder) if architecture.model == "sd3" else 0),
            guided_together=architecture.model == "sd3",
            **_memory_settings(self),
        )

    def model(self, folder: Path, device: torch.device) -> FlowModel:
        from groupwise.workloads.flow.models.image import load_image_model

        size = (self.height, self.width)
        return load_image_model(
            folder, size, guidance_embedding=self.guidance_embedding, **self._model_settings(device)
        )


def _vae_factors(folder: Path) -> tuple[int, int]:
    """By how much a pipeline's VAE reduces the frames, and height and width; 4 and 8 where its config is not there."""
    content = _config(folder / "vae" / "config.json")
    if "block_out_channels" in content:
        return 1, 2 ** (len(content["block_out_channels"]) - 1)
    side = 2 ** len(content.get("temperal_downsample", (True, True, True)))
    return int(content.get("scale_factor_temporal", 4)), int(content.get("scale_factor_spatial", side))


def _clip_tokens(folder: Path) -> int:
    return int(_config(folder / "tokenizer" / "tokenizer_config.json").get("model_max_length", 77))


def _config(file: Path) -> Mapping[str, Any]:
    content: Mapping[str, Any] = parse_json(file.read_bytes()) if file.exists() else {}
    return content


def _memory_settings(config: PipelineConfig) -> dict[str, Any]:
    """Settings of a FlowMemory that do not depend on the model."""
    return {
        "trained_steps": len(window_at(config.sampling, 0)),
        "part": config.train.part,
        "guided": config.sampling.guidance_scale != 1,
        "shared_noise": config.sampling.shared_noise,
        "decode_rows": config.encode_rows,
        "checkpointing": config.gradient_checkpointing,
        "lora_rank": config.train.lora_rank,
        "dtype_bytes": 2 if config.dtype == "bfloat16" else 4,
        "storage_bytes": 2 if config.sampling.latent_dtype == "bfloat16" else 4,
    }


def _given(pipeline: Path | None) -> Path:
    if pipeline is None:
        raise UserError("workload.pipeline is not given: a plan needs its transformer's config.json.")
    return pipeline
