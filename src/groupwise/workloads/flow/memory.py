"""Memory of training a video flow model, by arithmetic: Wan's transformer with camera layers. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupwise.core.errors import UserError, require
from groupwise.memory.plan import Reduction
from groupwise.memory.stages import StageBytes, StepSpec, WeightBytes, peak_of_rollout, peak_of_update

_REQUIRED = ("num_attention_heads", "attention_head_dim", "num_layers", "ffn_dim", "in_channels", "text_dim")


@dataclass(frozen=True)
class WanArchitecture:
    """The sizes of diffusers' WanTransformer3DModel, and of the two camera layers of each block."""

    width: int
    layers: int
    ffn_dim: int
    channels: int
    text_width: int
    time_width: int = 256
    patch: tuple[int, ...] = (1, 2, 2)
    cross_norm: bool = True
    pose_dim: int = 12

    @property
    def parameters(self) -> int:
        """All of them, exactly."""
        width, patch = self.width, self.channels * self.patch[0] * self.patch[1] * self.patch[2]
        attention = 4 * (width * width + width) + 2 * width  # with norms of queries and keys
        norm = 2 * width if self.cross_norm else 0
        feed_forward = 2 * width * self.ffn_dim + self.ffn_dim + width
        block = 2 * attention + norm + feed_forward + 6 * width + self._camera_params_per_layer
        time = self.time_width * width + width + width * width + width + width * 6 * width + 6 * width
        text = self.text_width * width + width + width * width + width
        patch_in_and_out = patch * width + width + width * patch + patch + 2 * width
        return self.layers * block + time + text + patch_in_and_out

    def lora_params(self, rank: int) -> int:
        """LoRA on queries, keys, values and outputs of both attentions, and on the two camera layers."""
        return self.layers * rank * (9 * 2 * self.width + self.pose_dim + self.width)

    @property
    def camera_params(self) -> int:
        return self.layers * self._camera_params_per_layer

    @property
    def _camera_params_per_layer(self) -> int:
        return self.pose_dim * self.width + self.width + self.width * self.width + self.width


@dataclass(frozen=True)
class FlowMemory:
    """A video model, and the clips it works with."""

    model: WanArchitecture
    latent: tuple[int, ...]
    """Channels, frames, height, width."""
    trained_steps: int
    """Denoising steps in the window: their graphs are held together in a pass."""
    pixels: int = 0
    """Numbers of a decoded clip."""
    source_frames: int | None = None
    """Latent frames of the source clip; None for as many as are generated."""
    text_tokens: int = 226
    guided: bool = False
    lora_rank: int | None = None
    camera_only: bool = False
    dtype_bytes: int = 4
    """Of frozen weights and of what the passes compute."""
    storage_bytes: int = 4
    """Of a number of the window's latents."""
    shared_noise: bool = False
    """Members of a group share the window's first step: its graph is built once for those of a pass."""
    decode_rows: int = 1
    """Clips decoded at a time. Finished clips wait for their rewards in the host's memory, not on the device."""
    checkpointing: bool = False

    def __post_init__(self) -> None:
        require(self.trained_steps >= 1, "trained steps", self.trained_steps, "at least 1")

    def predict(self, spec: StepSpec) -> StageBytes:
        weights = self._weights()
        persistent = weights.by_part(spec)
        if self.lora_rank is None:  # the initial values of what is trained
            persistent["reference"] = weights.trained_params * weights.trained_dtype_bytes
        temporaries, one_pass = weights.optimizer_temporaries(spec), spec.shape.passes == 1
        return StageBytes(
            peak_of_rollout(persistent, self._rollout_peaks(spec)),
            peak_of_update(persistent, [self._update_peak(spec)], temporaries, one_pass=one_pass),
        )

    @property
    def tokens(self) -> int:
        """Of one row in one step: target and source on the frame axis, with and without the prompt if guided."""
        _, frames, height, width = self.latent
        _, patch_height, patch_width = self.model.patch
        all_frames = frames + (frames if self.source_frames is None else self.source_frames)
        return all_frames * (height // patch_height) * (width // patch_width) * (2 if self.guided else 1)

    def trajectory_bytes(self, spec: StepSpec) -> int:
        """The window's latents and the final one of every row of a rank."""
        channels, frames, height, width = self.latent
        bytes_per_number = (self.trained_steps + 1) * self.storage_bytes + 4
        return spec.shape.rollouts_per_rank * channels * frames * height * width * bytes_per_number

    def first_step_rows(self, spec: StepSpec) -> int:
        """Rows of a pass that the window's first step is computed for."""
        rows = spec.shape.largest_pass
        return spec.conditions_in(rows) if self.shared_noise else rows

    def saved_per_block(self) -> int:
        """Bytes per token that a block saves for backward, as traced: eight widths around the norms, in float32."""
        width, ffn_dim, number = self.model.width, self.model.ffn_dim, self.dtype_bytes
        if self._is_frozen:  # inputs of frozen layers need not be saved
            trained = 10 * self.lora_rank if self.lora_rank is not None else width
            return 8 * width * 4 + int(7.1 * width * number) + ffn_dim * number + trained * 4
        return 8 * width * 4 + int(15.3 * width * number) + 2 * ffn_dim * number

    @property
    def _is_frozen(self) -> bool:
        """Only layers beside the model's own are trained."""
        return self.lora_rank is not None or self.camera_only

    def _weights(self) -> WeightBytes:
        parameters, camera, number = self.model.parameters, self.model.camera_params, self.dtype_bytes
        if self.lora_rank is not None:
            return WeightBytes(parameters, self.model.lora_params(self.lora_rank), number, 4)
        if self.camera_only:
            return WeightBytes(parameters - camera, camera, number, number)
        return WeightBytes(0, parameters, trained_dtype_bytes=number)

    def _rollout_peaks(self, spec: StepSpec) -> list[dict[str, int]]:
        """In the attention or the feed-forward part of a block, with widths as traced; or while clips are decoded.

        All rows of a pass take the steps after the window, of which there is at least one, whatever they shared before.
        """
        width, shape, number = self.model.width, spec.shape, self.dtype_bytes
        block = int(max(14.25 * width, 4.3 * width + 2 * self.model.ffn_dim))
        decoded = 2 * min(self.decode_rows, shape.rollouts_per_rank) * self.pixels * number
        latents = {"latents": self.trajectory_bytes(spec)}
        in_and_out = 2 * 4 * math.prod(self.latent)
        return [
            {**latents, "activations": shape.largest_pass * (self.tokens * block * number + in_and_out)},
            {**latents, "decoded frames": decoded},
        ]

    def _update_peak(self, spec: StepSpec) -> dict[str, int]:
        first, later = self.first_step_rows(spec), spec.shape.largest_pass * (self.trained_steps - 1)
        block, width = self.saved_per_block(), self.model.width * 4
        saved = self.model.layers * (width if self.checkpointing else block)
        recomputed = block if self.checkpointing else 0
        ffn_gradients = (2 if self._is_frozen else 1) * self.model.ffn_dim * self.dtype_bytes
        backward = recomputed + ffn_gradients + (2 if self._is_frozen else 4) * width
        backward_rows = spec.shape.largest_pass if later else first
        return {
            "latents": self.trajectory_bytes(spec),
            "activations": self.tokens * ((first + later) * saved + backward_rows * backward),
        }

    def reductions(self) -> list[Reduction]:
        reductions: list[Reduction] = []
        memory = self
        if not memory.checkpointing:
            memory = replace(memory, checkpointing=True)
            effect = "a third more time in training"
            reductions.append(Reduction("gradient_checkpointing", "on", memory, effect=effect))
        if memory.trained_steps > 1:
            memory = replace(memory, trained_steps=1)
            reductions.append(Reduction("window.size", 1, memory, effect="one trained step", changes_result=True))
        if memory.lora_rank is None:
            memory = replace(memory, lora_rank=32, camera_only=False)
            effect = "only an adapter is trained"
            reductions.append(Reduction("train.part", "lora", memory, effect=effect, changes_result=True))
        channels, frames, height, width = memory.latent
        if frames > 2:
            half = (frames + 1) // 2
            memory = replace(memory, latent=(channels, half, height, width), pixels=memory.pixels * half // frames)
            reductions.append(Reduction("latent frames", half, memory, previous=frames, changes_result=True))
        return reductions


def read_wan_architecture(folder: Path) -> WanArchitecture:
    """From a transformer's config.json, or a folder that holds it (also as a pipeline's transformer/)."""
    return wan_architecture(read_transformer_config(folder), str(folder))


def read_transformer_config(folder: Path) -> dict[str, Any]:
    """The content of a transformer's config.json."""
    candidates = (folder, folder / "config.json", folder / "transformer" / "config.json")
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise UserError(f"{folder} holds no config.json of a transformer. Give the folder of a pipeline.")
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def wan_architecture(content: Mapping[str, Any], source: str = "The config") -> WanArchitecture:
    """From the content of a config.json; `source` names it in error messages."""
    class_name = str(content.get("_class_name"))
    missing = [field for field in _REQUIRED if field not in content]
    if class_name != "WanTransformer3DModel" or missing:
        lacks = f" and lacks {', '.join(missing)}" if missing else ""
        raise UserError(
            f"{source} is of class '{class_name}'{lacks}: the plan knows WanTransformer3DModel. `groupwise plan RECIPE"
            " --probe` measures a real step instead."
        )
    return WanArchitecture(
        width=content["num_attention_heads"] * content["attention_head_dim"],
        layers=content["num_layers"],
        ffn_dim=content["ffn_dim"],
        channels=content["in_channels"],
        text_width=content["text_dim"],
        time_width=content.get("freq_dim", 256),
        patch=tuple(content.get("patch_size", (1, 2, 2))),
        cross_norm=bool(content.get("cross_attn_norm", True)),
    )
