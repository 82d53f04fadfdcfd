"""Memory of training a video flow model: Wan's transformer with camera layers, by its config alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupwise.core.errors import UserError, require
from groupwise.memory.stages import StageBytes, StepSpec, WeightBytes, drop_zero, peak_of_update

_NEEDED = ("num_attention_heads", "attention_head_dim", "num_layers", "ffn_dim", "in_channels", "text_dim")


@dataclass(frozen=True)
class WanArchitecture:
    """The widths of diffusers' WanTransformer3DModel, and the two camera layers of each block."""

    width: int
    layers: int
    inner: int
    channels: int
    text_width: int
    time_width: int = 256
    patch: tuple[int, ...] = (1, 2, 2)
    cross_norm: bool = True
    head_width: int = 128
    pose: int = 12

    @property
    def parameters(self) -> int:
        """All of them, exactly."""
        wide, patch = self.width, self.channels * self.patch[0] * self.patch[1] * self.patch[2]
        attention = 4 * (wide * wide + wide) + 2 * wide  # with norms of queries and keys
        norm = 2 * wide if self.cross_norm else 0
        feed_forward = 2 * wide * self.inner + self.inner + wide
        camera = self.pose * wide + wide + wide * wide + wide
        block = 2 * attention + norm + feed_forward + 6 * wide + camera
        time = self.time_width * wide + wide + wide * wide + wide + wide * 6 * wide + 6 * wide
        text = self.text_width * wide + wide + wide * wide + wide
        ends = patch * wide + wide + wide * patch + patch + 2 * wide
        return self.layers * block + time + text + ends

    def adapter_numbers(self, rank: int) -> int:
        """LoRA on queries, keys, values and outputs of both attentions, and on the two camera layers."""
        square = 2 * self.width
        return self.layers * rank * (9 * square + self.pose + self.width)

    @property
    def camera_numbers(self) -> int:
        return self.layers * (self.pose * self.width + self.width + self.width * self.width + self.width)


def read_video_model(folder: Path) -> WanArchitecture:
    """From a transformer's config.json, or a folder that holds it (also as a pipeline's transformer/)."""
    return video_model(read_video_config(folder), str(folder))


def read_video_config(folder: Path) -> dict[str, Any]:
    files = (folder, folder / "config.json", folder / "transformer" / "config.json")
    file = next((each for each in files if each.is_file()), None)
    if file is None:
        raise UserError(f"{folder} holds no config.json of a transformer. Give the folder of a pipeline.")
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def video_model(content: Mapping[str, Any], name: str = "The config") -> WanArchitecture:
    kind = str(content.get("_class_name"))
    missing = [field for field in _NEEDED if field not in content]
    if kind != "WanTransformer3DModel" or missing:
        raise UserError(
            f"{name} is of class '{kind}'{' and lacks ' + ', '.join(missing) if missing else ''}: the arithmetic knows"
            " WanTransformer3DModel. `groupwise plan RECIPE --probe` runs a real step instead."
        )
    return WanArchitecture(
        width=content["num_attention_heads"] * content["attention_head_dim"],
        layers=content["num_layers"],
        inner=content["ffn_dim"],
        channels=content["in_channels"],
        text_width=content["text_dim"],
        time_width=content.get("freq_dim", 256),
        patch=tuple(content.get("patch_size", (1, 2, 2))),
        cross_norm=bool(content.get("cross_attn_norm", True)),
        head_width=content["attention_head_dim"],
    )


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
    text_tokens: int = 226
    guided: bool = False
    lora_rank: int | None = None
    camera_only: bool = False
    number_bytes: int = 4
    """Of a frozen weight and of what the passes compute."""
    stored_bytes: int = 4
    """Of a number of the window's latents."""
    branch: bool = False
    """Members of a group share the window's first step: its graph is built once for those of a pass."""
    decode_rows: int = 1
    """Clips decoded at a time. Finished ones wait in the host's memory for their rewards, not on the device."""
    visitors: int = 0
    """Bytes of the text encoder or VAE while it is on the device."""
    checkpointing: bool = False

    def __post_init__(self) -> None:
        require(self.trained_steps >= 1, "trained steps", self.trained_steps, "at least 1")

    def stages(self, job: StepSpec) -> StageBytes:
        held = self._held(job)
        rollout = {name: held[name] for name in ("weights", "optimizer", "averaged weights", "reference")}
        in_step = self._trained().in_step(job)
        update = peak_of_update(held, [self._update(job)], in_step, one_pass=job.shape.passes == 1)
        return StageBytes(drop_zero({**rollout, **self._rollout(job)}), drop_zero(update))

    @property
    def tokens(self) -> int:
        """Of one row in one step: target and source on the frame axis, with and without the prompt if guided."""
        _, frames, height, width = self.latent
        _, down, across = self.model.patch
        return 2 * frames * (height // down) * (width // across) * (2 if self.guided else 1)

    @property
    def _numbers(self) -> int:
        channels, frames, height, width = self.latent
        return channels * frames * height * width

    def _trained(self) -> WeightBytes:
        every, camera, number = self.model.parameters, self.model.camera_numbers, self.number_bytes
        if self.lora_rank is not None:
            return WeightBytes(every, self.model.adapter_numbers(self.lora_rank), number, 4)
        if self.camera_only:
            return WeightBytes(every - camera, camera, number, number)
        return WeightBytes(0, every, trained_bytes=number)

    def _held(self, job: StepSpec) -> dict[str, int]:
        trained = self._trained()
        parts = trained.parts(job)
        first_weights = 0 if self.lora_rank is not None else trained.trained * trained.trained_bytes
        return parts | {"reference": first_weights // job.shards}

    def trajectory_bytes(self, job: StepSpec) -> int:
        """The window's latents and the finished one of every row of a rank."""
        kept = (self.trained_steps + 1) * self.stored_bytes + 4
        return job.shape.rollouts_per_rank * self._numbers * kept

    def starts(self, job: StepSpec) -> int:
        """Rows of a pass that the window's first step is computed for."""
        rows = job.shape.largest_pass
        return job.prompts_in(rows) if self.branch else rows

    def _rollout(self, job: StepSpec) -> dict[str, int]:
        """In the attention or the feed-forward part of a block, widths as traced; or when clips are decoded.

        All rows of a pass take the steps behind the window, which there always are, whatever they shared before.
        """
        wide, inner, rows = self.model.width, self.model.inner, job.shape.largest_pass
        one_block = int(max(14.25 * wide, 4.3 * wide + 2 * inner))
        decoded = 2 * min(self.decode_rows, job.shape.rollouts_per_rank) * self.pixels * self.number_bytes
        moments = [
            {"activations": rows * self.tokens * one_block * self.number_bytes},
            {"decoded frames": decoded, "text encoder or VAE": self.visitors},
        ]
        return {"latents": self.trajectory_bytes(job)} | max(moments, key=lambda parts: sum(parts.values()))

    def _update(self, job: StepSpec) -> dict[str, int]:
        later = job.shape.largest_pass * (self.trained_steps - 1)
        rows = self.starts(job) if not later else job.shape.largest_pass
        block, wide = self.kept_by_block(), self.model.width * 4
        held = self.model.layers * (wide if self.checkpointing else block)
        moment = block if self.checkpointing else 0
        moment += (2 if self.lora_rank else 1) * self.model.inner * self.number_bytes + (
            2 if self.lora_rank else 4
        ) * wide
        return {
            "latents": self.trajectory_bytes(job),
            "activations": self.tokens * ((self.starts(job) + later) * held + rows * moment),
        }

    def kept_by_block(self) -> int:
        """Bytes that a block keeps of one token, as traced: eight widths of it around the norms, always in float32."""
        wide, inner, number = self.model.width, self.model.inner, self.number_bytes
        if self.lora_rank is not None:  # inputs of frozen layers need not be kept
            return 8 * wide * 4 + int(7.1 * wide * number) + inner * number + 10 * self.lora_rank * 4
        return 8 * wide * 4 + int(15.3 * wide * number) + 2 * inner * number

    def smaller(self) -> list[tuple[str, FlowMemory, bool]]:
        found: list[tuple[str, FlowMemory, bool]] = []
        now = self
        if not now.checkpointing:
            now = replace(now, checkpointing=True)
            found.append(("gradient_checkpointing on (a third more time in training)", now, False))
        if now.trained_steps > 1:
            now = replace(now, trained_steps=1)
            found.append(("window.size 1: one trained step", now, True))
        if now.lora_rank is None:
            now = replace(now, lora_rank=32, camera_only=False)
            found.append(("train.part lora: an adapter alone", now, True))
        channels, frames, height, width = now.latent
        if frames > 2:
            fewer = (channels, (frames + 1) // 2, height, width)
            now = replace(now, latent=fewer, pixels=now.pixels * fewer[1] // frames)
            found.append((f"half the frames: {fewer[1]} latent frames", now, True))
        return found
