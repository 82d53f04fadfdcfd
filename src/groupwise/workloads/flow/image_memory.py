"""Sizes of the transformers of image models: Stable Diffusion 3, Flux.1 and Qwen-Image. No torch.

Their blocks join image and text tokens in one attention: double blocks have weights of their own for each of the two,
Flux's single blocks one set for both. The feed-forward part is four times as wide as the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from groupwise.core.errors import UserError

_TIME_WIDTH = 256


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of a token per number of the width, as traced."""

    saved: float
    """For the backward pass, in a block."""
    backward: float
    """At the peak of the backward pass, besides what is saved."""
    recomputed: float
    """At the peak of the backward pass of a block that is recomputed."""
    forward: float
    """At the peak of a pass without gradients."""


DOUBLE, SINGLE, DUAL = "double", "single", "dual"
"""Dual blocks are double ones with a second attention of the image alone (Stable Diffusion 3.5 medium)."""
_TRACED = {
    ("sd3", DOUBLE, 2): TokenBytes(45.0, 7.9, 56.1, 25.3),
    ("sd3", DOUBLE, 4): TokenBytes(54.7, 19.1, 77.0, 45.0),
    ("sd3", DUAL, 2): TokenBytes(81.0, 7.9, 95.1, 32.6),
    ("sd3", DUAL, 4): TokenBytes(82.3, 19.1, 108.4, 52.8),
    ("flux", DOUBLE, 2): TokenBytes(39.3, 13.3, 53.3, 27.6),
    ("flux", DOUBLE, 4): TokenBytes(51.2, 27.1, 78.2, 46.1),
    ("flux", SINGLE, 2): TokenBytes(37.6, 20.2, 67.2, 35.6),
    ("flux", SINGLE, 4): TokenBytes(44.3, 38.0, 93.4, 62.1),
    ("qwen-image", DOUBLE, 2): TokenBytes(43.0, 19.7, 64.3, 35.3),
    ("qwen-image", DOUBLE, 4): TokenBytes(50.7, 35.3, 86.0, 55.8),
}
"""By model, kind of block, and the bytes of a number in the frozen layers; with an adapter on the attention."""
_MODELS = {
    "SD3Transformer2DModel": "sd3",
    "FluxTransformer2DModel": "flux",
    "QwenImageTransformer2DModel": "qwen-image",
}


@dataclass(frozen=True)
class ImageArchitecture:
    """An Architecture (see memory.py)."""

    model: str
    width: int
    head_width: int
    double_blocks: int
    single_blocks: int
    token_in: int
    """Numbers of an image token before the transformer, and after it."""
    token_out: int
    text_width: int
    pooled_width: int = 0
    """Of the pooled text embedding; 0 without one."""
    has_guidance: bool = False
    dual_attention_blocks: int = 0
    """Those of the double blocks that are dual ones."""
    has_qk_norm: bool = True
    patch: int = 2
    """Pixels of a latent that make a token, along each side."""
    position_side: int = 0
    """Of the table of Stable Diffusion 3's position embeddings."""

    @property
    def fixed_numbers(self) -> int:
        return self.position_side**2 * self.width

    @property
    def parameters(self) -> int:
        width, embedders = self.width, 1 + bool(self.pooled_width) + self.has_guidance
        in_and_out = self._linear(self.token_in) + self._linear(self.text_width) + self._linear(2 * width)
        embedded = (1 + self.has_guidance) * self._linear(_TIME_WIDTH)
        embedded += self._linear(self.pooled_width) if self.pooled_width else 0
        output = width * self.token_out + self.token_out + width  # the norm's linear layer has two widths of biases
        text_norm = self.text_width if self.model == "qwen-image" else 0
        outside = in_and_out + embedded + embedders * self._linear(width) + output + text_norm
        return outside + self.blocks_params

    @property
    def block_params(self) -> int:
        """Of the largest block."""
        dual = 7 * self._linear(self.width) + self._norm_params // 2 if self.dual_attention_blocks else 0
        return max(self._double_params + dual, self._single_params if self.single_blocks else 0)

    @property
    def blocks_params(self) -> int:
        """Of all blocks."""
        width = self.width
        blocks = self.double_blocks * self._double_params + self.single_blocks * self._single_params
        blocks += self.dual_attention_blocks * (7 * self._linear(width) + self._norm_params // 2)
        if self.model == "sd3":  # the last block gives no text: no feed-forward, no output, two of six modulations
            blocks -= self._linear(4 * width) + self._linear(4 * width) + 3 * width + 5 * self._linear(width)
        return blocks

    @property
    def _double_params(self) -> int:
        """Modulation, attention and feed-forward part, twice."""
        feed_forward = 2 * self._linear(4 * self.width) + 3 * self.width
        return 2 * (6 * self._linear(self.width) + 4 * self._linear(self.width) + feed_forward) + self._norm_params

    @property
    def _single_params(self) -> int:
        """Modulation by three; queries, keys, values and the feed-forward part side by side."""
        width = self.width
        joined = self._linear(4 * width) + 3 * width + self._linear(5 * width)
        return 3 * self._linear(width) + 3 * self._linear(width) + joined + 2 * self.head_width

    @property
    def _norm_params(self) -> int:
        """Of queries and keys, of image and text."""
        return 4 * self.head_width if self.has_qk_norm else 0

    def _linear(self, size: int) -> int:
        """Parameters of a linear layer from `size` numbers to the width."""
        return size * self.width + self.width

    def trained_params(self, part: str, rank: int) -> int:
        """All, or LoRA on queries, keys, values and outputs of the image; single blocks have no output layer."""
        if part != "lora":
            return self.parameters
        layers = 4 * (self.double_blocks + self.dual_attention_blocks) + 3 * self.single_blocks
        return layers * rank * 2 * self.width

    def tokens(self, latent: tuple[int, ...], text_tokens: int) -> int:
        _, height, width = latent
        return (height // self.patch) * (width // self.patch) + text_tokens

    def saved_bytes(self, part: str, number: int, rank: int) -> int:
        layers = 4 * (self.double_blocks + self.dual_attention_blocks) + 3 * self.single_blocks
        adapters = 4 * rank * layers if part == "lora" else 0
        of_width = sum(self._blocks[kind] * traced.saved for kind, traced in self._traced(part, number).items())
        return int(of_width * self.width) + adapters

    def backward_bytes(self, part: str, number: int) -> int:
        return self._largest(part, number, "backward")

    def input_bytes(self, number: int) -> int:
        return (self.double_blocks + self.single_blocks) * self.width * number

    def recomputed_bytes(self, part: str, number: int, rank: int) -> int:
        return self._largest(part, number, "recomputed") + (16 * rank if part == "lora" else 0)

    def forward_bytes(self, part: str, number: int) -> int:
        return self._largest(part, number, "forward")

    def text_bytes(self, part: str, number: int, *, checkpointing: bool) -> tuple[int, int]:
        """None: text is among the tokens."""
        return 0, 0

    def _largest(self, part: str, number: int, field: str) -> int:
        return int(max(getattr(traced, field) for traced in self._traced(part, number).values()) * self.width)

    def _traced(self, part: str, number: int) -> dict[str, TokenBytes]:
        assert part == "lora"
        return {kind: _TRACED[self.model, kind, number] for kind in self._blocks}

    @property
    def _blocks(self) -> dict[str, int]:
        """How many there are of each kind."""
        dual = self.dual_attention_blocks
        counts = {DOUBLE: self.double_blocks - dual, SINGLE: self.single_blocks, DUAL: dual}
        return {kind: count for kind, count in counts.items() if count}

    def require_known(self, part: str, number: int) -> None:
        """Refuse what was not traced."""
        if part != "lora" or any((self.model, kind, number) not in _TRACED for kind in self._blocks):
            raise UserError(
                f"workload.train.part is '{part}': the plan of this image model knows 'lora' alone. `groupwise plan"
                " RECIPE --probe` measures a real step."
            )


def image_architecture(content: Mapping[str, Any], source: str = "The config") -> ImageArchitecture:
    """From the content of a transformer's config.json; `source` names it in error messages."""
    class_name = str(content.get("_class_name"))
    if class_name not in _MODELS:
        raise UserError(
            f"{source} is of class '{class_name}': the plan knows {', '.join(_MODELS)}. `groupwise plan RECIPE --probe`"
            " measures a real step instead."
        )
    model, heads = _MODELS[class_name], content["num_attention_heads"]
    patch, channels = content["patch_size"], content["in_channels"]
    out_channels = content.get("out_channels") or channels
    return ImageArchitecture(
        model,
        width=heads * content["attention_head_dim"],
        head_width=content["attention_head_dim"],
        double_blocks=content["num_layers"],
        single_blocks=content.get("num_single_layers", 0),
        token_in=channels * patch**2 if model == "sd3" else channels,
        token_out=out_channels * patch**2,
        text_width=content["joint_attention_dim"],
        pooled_width=content.get("pooled_projection_dim", 0),
        has_guidance=model == "flux" and bool(content.get("guidance_embeds")),
        dual_attention_blocks=len(content.get("dual_attention_layers") or ()),
        has_qk_norm=model != "sd3" or content.get("qk_norm") is not None,
        position_side=content.get("pos_embed_max_size", 96) if model == "sd3" else 0,
        patch=patch if model == "sd3" else 2,
    )
