"""Memory of training a flow model, by arithmetic; and the sizes of Wan's transformer. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from groupwise.core.errors import UserError, require
from groupwise.core.io.files import read_json
from groupwise.memory.plan import Reduction
from groupwise.memory.sharding import ShardUnits, UnitParams, per_rank
from groupwise.memory.stages import PassPeaks, StageBytes, StepSpec, WeightBytes

_REQUIRED = ("num_attention_heads", "attention_head_dim", "num_layers", "ffn_dim", "in_channels", "text_dim")
_LOGPROB_COPIES = 5
"""Of the latents, while a step is scored: means, differences, squares, densities."""


class Architecture(Protocol):
    """A transformer's sizes: its parameters exactly, and the bytes of one token in it, as traced.

    `part` is what is trained, as in TrainedPartsConfig; `number` are the bytes of a number in the frozen layers.
    """

    @property
    def parameters(self) -> int: ...

    @property
    def block_params(self) -> int:
        """Of the largest block."""
        ...

    @property
    def blocks_params(self) -> int:
        """Of all blocks."""
        ...

    @property
    def fixed_numbers(self) -> int:
        """Of tables that are not parameters, such as position embeddings."""
        ...

    def trained_params(self, part: str, rank: int) -> int: ...

    def tokens(self, latent: tuple[int, ...], text_tokens: int) -> int:
        """Of one row in one pass through the model."""
        ...

    def saved_bytes(self, part: str, number: int, rank: int) -> int:
        """For the backward pass, over all blocks."""
        ...

    def backward_bytes(self, part: str, number: int) -> int:
        """At the peak of the backward pass, besides what is saved."""
        ...

    def input_bytes(self, number: int) -> int:
        """Of the inputs of all blocks: what is saved with gradient checkpointing."""
        ...

    def recomputed_bytes(self, part: str, number: int, rank: int) -> int:
        """At the peak of the backward pass of a block that is recomputed."""
        ...

    def forward_bytes(self, part: str, number: int) -> int:
        """At the peak of a pass without gradients."""
        ...

    def text_bytes(self, part: str, number: int, *, checkpointing: bool) -> tuple[int, int]:
        """Of a token of text that is only attended to, in an update: in the graph of each pass, and once."""
        ...


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of a token in a block, as traced: per number of the width, and per number of the feed-forward width."""

    saved: tuple[float, float]
    """For the backward pass."""
    backward: tuple[float, float]
    """At the peak of the backward pass, besides what is saved."""
    recomputed: tuple[float, float]
    """The same with what is saved, of a block that is recomputed."""
    attention: float
    """At the peak of the attention without gradients; in the feed-forward part it is `feed_forward`."""
    feed_forward: float


_TRACED = {
    ("lora", 2): BlockBytes((64.4, 2.0), (18.9, 0.87), (83.6, 3.5), 30.7, 10.7),
    ("lora", 4): BlockBytes((54.3, 5.0), (15.7, 5.75), (68.6, 11.0), 43.2, 19.2),
    ("camera", 2): BlockBytes((40.3, 2.0), (18.9, 0.87), (59.5, 3.5), 26.7, 10.7),
    ("camera", 4): BlockBytes((46.3, 5.0), (15.7, 5.75), (60.5, 11.0), 37.2, 19.2),
    ("recam", 4): BlockBytes((58.3, 5.0), (15.7, 5.75), (72.5, 11.0), 37.2, 19.2),
    ("all", 4): BlockBytes((93.2, 8.0), (16.0, 4.0), (109.2, 12.0), 57.0, 17.2),
}
"""By what is trained, and by the bytes of a number in the frozen layers. Adapters get their inputs in float32."""
_TRACED_TEXT = {("lora", 2): 16, ("lora", 4): 13, ("camera", 2): 4, ("camera", 4): 8, ("recam", 4): 8, ("all", 4): 13}
"""Bytes of a token of text in a block, per number of the width: its keys and values, and what made them."""


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
    """Numbers of a camera pose; 0 without camera layers."""
    out_channels: int | None = None
    """None for as many as go in."""
    image_width: int = 0
    """Of the image embedding that Wan 2.1 makes clips from; 0 without one."""
    source_frames: int | None = None
    """Latent frames of the source clip that comes with camera layers; None for as many as are generated."""

    @property
    def parameters(self) -> int:
        """All of them, exactly."""
        width, patch = self.width, self.patch[0] * self.patch[1] * self.patch[2]
        patch_in, patch_out = self.channels * patch, (self.out_channels or self.channels) * patch
        time = self.time_width * width + width + width * width + width + width * 6 * width + 6 * width
        text = self.text_width * width + width + width * width + width
        patch_in_and_out = patch_in * width + width + width * patch_out + patch_out + 2 * width
        return self.blocks_params + time + text + patch_in_and_out + self._image_params

    @property
    def block_params(self) -> int:
        width = self.width
        attention = 4 * (width * width + width) + 2 * width  # with norms of queries and keys
        norm = 2 * width if self.cross_norm else 0
        feed_forward = 2 * width * self.ffn_dim + self.ffn_dim + width
        in_block = 2 * attention + norm + feed_forward + 6 * width
        return in_block + self._camera_params_per_layer + self._image_params_per_layer

    @property
    def blocks_params(self) -> int:
        return self.layers * self.block_params

    @property
    def fixed_numbers(self) -> int:
        return 0  # those of rotary positions are small

    @property
    def _image_params(self) -> int:
        """Two norms and two linear layers that embed the image."""
        image, width = self.image_width, self.width
        return image * image + image + image * width + width + 2 * image + 2 * width if image else 0

    @property
    def _image_params_per_layer(self) -> int:
        """Keys, with their norm, and values of the image in cross-attention."""
        return 2 * (self.width * self.width + self.width) + self.width if self.image_width else 0

    def lora_params(self, rank: int) -> int:
        """LoRA on queries, keys, values and outputs of both attentions, and on the two camera layers."""
        camera = 3 * self.width + self.pose_dim if self.pose_dim else 0
        return self.layers * rank * (8 * 2 * self.width + camera)

    @property
    def camera_params(self) -> int:
        return self.layers * self._camera_params_per_layer

    @property
    def recam_params(self) -> int:
        """Camera layers and self-attention."""
        width = self.width
        return self.camera_params + self.layers * (4 * (width * width + width) + 2 * width)

    @property
    def _camera_params_per_layer(self) -> int:
        if not self.pose_dim:
            return 0
        return self.pose_dim * self.width + self.width + self.width * self.width + self.width

    def trained_params(self, part: str, rank: int) -> int:
        if part == "lora":
            return self.lora_params(rank)
        return {"camera": self.camera_params, "recam": self.recam_params}.get(part, self.parameters)

    def tokens(self, latent: tuple[int, ...], text_tokens: int) -> int:
        """Of the clip, and with camera layers of its source, too. Text is only attended to."""
        _, frames, height, width = latent
        source_frames = (frames if self.source_frames is None else self.source_frames) if self.pose_dim else 0
        return (frames + source_frames) * (height // self.patch[1]) * (width // self.patch[2])

    def saved_bytes(self, part: str, number: int, rank: int) -> int:
        return self.layers * (self._bytes(_traced(part, number).saved) + _adapter_bytes(part, rank))

    def backward_bytes(self, part: str, number: int) -> int:
        return self._bytes(_traced(part, number).backward)

    def input_bytes(self, number: int) -> int:
        return self.layers * self.width * number

    def recomputed_bytes(self, part: str, number: int, rank: int) -> int:
        return self._bytes(_traced(part, number).recomputed) + _adapter_bytes(part, rank)

    def forward_bytes(self, part: str, number: int) -> int:
        """In the attention, or in the feed-forward part."""
        traced = _traced(part, number)
        attention, feed_forward = (traced.attention, 0.0), (traced.feed_forward, 2.0 * number)
        return max(self._bytes(attention), self._bytes(feed_forward))

    def text_bytes(self, part: str, number: int, *, checkpointing: bool) -> tuple[int, int]:
        """Its embedding, and its keys and values in all blocks, or in the one that is recomputed."""
        block = self.width * (_TRACED_TEXT.get((part, number)) or _TRACED_TEXT[part, 4])
        embedding = self.width * number
        return (embedding, block) if checkpointing else (embedding + self.layers * block, 0)

    def _bytes(self, coefficients: tuple[float, float]) -> int:
        return int(coefficients[0] * self.width + coefficients[1] * self.ffn_dim)


def _traced(part: str, number: int) -> BlockBytes:
    return _TRACED.get((part, number)) or _TRACED[part, 4]


def _adapter_bytes(part: str, rank: int) -> int:
    """Of a token in a block: what the first matrices of eight adapters give, in float32."""
    return 8 * rank * 4 if part == "lora" else 0


@dataclass(frozen=True)
class FlowMemory:
    """A flow model, and the clips or images it works with."""

    model: Architecture
    latent: tuple[int, ...]
    """Channels, frames (of clips), height, width."""
    trained_steps: int
    """Denoising steps in the window: one graph at a time, all their latents."""
    part: str = "all"
    """What is trained, as in TrainedPartsConfig."""
    pixels: int = 0
    """Numbers of a decoded clip."""
    text_tokens: int = 512
    guided: bool = False
    guided_together: bool = True
    """Prompt and negative prompt go through the model as one batch, not one after the other."""
    transformers: int = 1
    """Of which one is used at a time."""
    lora_rank: int = 32
    """Where the part is lora."""
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
        if self.part != "lora":  # the initial values of what is trained
            persistent["reference"] = per_rank(weights.trained_params * weights.trained_dtype_bytes, spec.sharding)
        one_backward = spec.shape.passes == 1 and self.trained_steps == 1
        update = PassPeaks([self._update_peak(spec)], one_backward=one_backward)
        return weights.stage_bytes(spec, persistent, self._rollout_peaks(spec), update)

    @property
    def tokens(self) -> int:
        """Of one row in one pass through the model."""
        return self._together * self.model.tokens(self.latent, self.text_tokens)

    @property
    def _together(self) -> int:
        """Prompts of a row in one pass."""
        return 2 if self.guided and self.guided_together else 1

    @property
    def graphs(self) -> int:
        """Passes through the model whose graphs are held together in a step."""
        return 2 if self.guided and not self.guided_together else 1

    def trajectory_bytes(self, rows: int) -> int:
        """The window's latents and the final one of so many rows: a rank holds all its rows, and a pass copies some."""
        bytes_per_number = (self.trained_steps + 1) * self.storage_bytes + 4
        return rows * math.prod(self.latent) * bytes_per_number

    def first_step_rows(self, spec: StepSpec) -> int:
        """Rows of a pass that the window's first step is computed for."""
        rows = spec.shape.largest_pass
        return spec.conditions_in(rows) if self.shared_noise else rows

    def _weights(self) -> WeightBytes:
        parameters, number = self.transformers * self.model.parameters, self.dtype_bytes
        fixed = self.transformers * self.model.fixed_numbers
        trained = self.transformers * self.model.trained_params(self.part, self.lora_rank)
        wide = number if self.part == "all" else 4
        frozen = fixed + (parameters if self.part == "lora" else parameters - trained)
        return WeightBytes(frozen, trained, number, wide, units=self._units(trained, number, wide))

    def _units(self, trained: int, number: int, wide: int) -> ShardUnits:
        """Of one transformer, as one is used at a time. What is trained in part is in the blocks, in equal shares."""
        model = self.model
        outside = model.parameters - model.blocks_params
        share = model.block_params / model.blocks_params
        if self.part == "all":
            block, root = UnitParams(0, model.block_params), UnitParams(0, outside)
        else:
            in_block = round(trained / self.transformers * share)
            whole = 0 if self.part == "lora" else in_block  # adapters come on top of the block's own
            block, root = UnitParams(model.block_params - whole, in_block), UnitParams(outside)
        adapters = trained if self.part == "lora" else 0
        return ShardUnits(block, root, self.transformers * model.parameters + adapters, trained, number, wide)

    def decoded_bytes(self, spec: StepSpec) -> int:
        """While clips are decoded."""
        return 2 * min(self.decode_rows, spec.shape.rollouts_per_rank) * self.pixels * self.dtype_bytes

    def _rollout_peaks(self, spec: StepSpec) -> list[dict[str, int]]:
        """In a block of the transformer, or while clips are decoded.

        All rows of a pass take the steps after the window, of which there is at least one, whatever they shared before.
        """
        shape, block = spec.shape, self.model.forward_bytes(self.part, self.dtype_bytes)
        latents = {"latents": self.trajectory_bytes(shape.rollouts_per_rank)}
        in_and_out = 3 * 4 * math.prod(self.latent)  # of a step: latents, what the model is given, and its result
        return [
            {**latents, "activations": shape.largest_pass * (self.tokens * block + in_and_out)},
            {**latents, "decoded frames": self.decoded_bytes(spec)},
        ]

    def _update_peak(self, spec: StepSpec) -> dict[str, int]:
        """The graph of one step of the window: of its rows, or of its groups where it is the first and only one."""
        rows = spec.shape.largest_pass if self.trained_steps > 1 else self.first_step_rows(spec)
        model, part, number = self.model, self.part, self.dtype_bytes
        if self.checkpointing:
            recomputed = model.recomputed_bytes(part, number, self.lora_rank)
            token = self.graphs * model.input_bytes(number) + recomputed
        else:
            saved = model.saved_bytes(part, number, self.lora_rank)
            token = self.graphs * saved + model.backward_bytes(part, number)
        of_graph, once = model.text_bytes(part, number, checkpointing=self.checkpointing)
        text = self._together * self.text_tokens * (self.graphs * of_graph + once)
        latents = self.trajectory_bytes(spec.shape.rollouts_per_rank + spec.shape.largest_pass)
        peak = {"latents": latents, "activations": rows * (self.tokens * token + text)}
        if rows < spec.shape.largest_pass:  # a small graph, beside which the rows' means and squared distances count
            peak["log-probs"] = spec.shape.largest_pass * _LOGPROB_COPIES * 4 * math.prod(self.latent)
        return peak

    def reductions(self) -> list[Reduction]:
        reductions: list[Reduction] = []
        memory = self
        if not memory.checkpointing:
            memory = replace(memory, checkpointing=True)
            effect = "a third more time in training"
            reductions.append(Reduction("gradient_checkpointing", "on", memory, effect=effect))
        if memory.part != "lora":
            memory = replace(memory, part="lora", lora_rank=32)
            effect = "only an adapter is trained"
            reductions.append(Reduction("train.part", "lora", memory, effect=effect, changes_result=True))
        if len(memory.latent) == 4 and memory.latent[1] > 2:
            channels, frames, height, width = memory.latent
            half = (frames + 1) // 2
            memory = replace(memory, latent=(channels, half, height, width), pixels=memory.pixels * half // frames)
            reductions.append(Reduction("latent frames", half, memory, previous=frames, changes_result=True))
        return reductions


def read_wan_architecture(folder: Path, *, camera_layers: bool = True) -> WanArchitecture:
    """From a transformer's config.json, or a folder that holds it (also as a pipeline's transformer/)."""
    architecture = wan_architecture(read_transformer_config(folder), str(folder))
    return architecture if camera_layers else replace(architecture, pose_dim=0)


def read_transformer_config(folder: Path) -> dict[str, Any]:
    """The content of a transformer's config.json."""
    candidates = (folder, folder / "config.json", folder / "transformer" / "config.json")
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise UserError(f"{folder} holds no config.json of a transformer. Give the folder of a pipeline.")
    return read_json(file, follow_links=True)


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
        out_channels=content.get("out_channels"),
        image_width=content.get("image_dim") or 0,
    )
