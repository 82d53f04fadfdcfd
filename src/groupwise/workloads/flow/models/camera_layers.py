"""Camera layers for diffusers' Wan transformer, as ReCamMaster has them (Bai et al., arXiv 2503.11647).

The source clip's latents stand behind the target's on the frame axis. In every block the poses, encoded by a linear
layer that begins at zero, are added to the tokens before self-attention, and a projector that begins as the identity
follows it: a fresh model is the base model on the joined clip, bit by bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from jaxtyping import Float
from torch import Tensor, nn

from groupwise.core.errors import UserError

POSE = 12


class RotaryAndPoses(NamedTuple):
    """What a block hands to its self-attention unread: rotary positions, and here the poses with them."""

    cosines: Tensor
    sines: Tensor
    poses: Float[Tensor, "rows tokens 12"]


class CameraAttention(nn.Module):
    """An attention processor with the two camera layers of its block, which stay in float32: they are trained."""

    def __init__(self, width: int):
        super().__init__()
        self.pose_encoder = nn.Linear(POSE, width)
        self.projector = nn.Linear(width, width)
        nn.init.zeros_(self.pose_encoder.weight)
        nn.init.zeros_(self.pose_encoder.bias)
        nn.init.eye_(self.projector.weight)
        nn.init.zeros_(self.projector.bias)
        self._plain = WanAttnProcessor()

    def forward(
        self,
        attention: nn.Module,
        tokens: Float[Tensor, "rows tokens width"],
        encoded: Tensor | None,
        mask: Tensor | None,
        placed: RotaryAndPoses,
    ) -> Float[Tensor, "rows tokens width"]:
        own = self.projector.weight.dtype
        posed = tokens + self.pose_encoder(placed.poses.to(own)).to(tokens.dtype)
        attended = self._plain(attention, posed, encoded, mask, (placed.cosines, placed.sines))
        return self.projector(attended.to(own)).to(tokens.dtype)


def add_camera_layers(transformer: WanTransformer3DModel) -> None:
    """Put the camera layers into every block; the base weights keep their names."""
    if transformer.config.patch_size[0] != 1:
        raise UserError(
            f"The transformer's patch_size is {tuple(transformer.config.patch_size)}: camera layers need patches of one"
            " frame, so that every token has one pose. Take a model with patch_size (1, height, width)."
        )
    width = transformer.config.num_attention_heads * transformer.config.attention_head_dim
    like = transformer.proj_out.weight
    for block in transformer.blocks:
        block.attn1.set_processor(CameraAttention(width).to(like.device))


def camera_weights(transformer: WanTransformer3DModel) -> dict[str, nn.Parameter]:
    """The camera layers' own weights, by name."""
    return {name: weight for name, weight in transformer.named_parameters() if ".attn1.processor." in name}


def camera_velocity(
    transformer: WanTransformer3DModel,
    latents: Float[Tensor, "rows channels frames height width"],
    timestep: Float[Tensor, " rows"],
    text: Float[Tensor, "rows words text_width"],
    source: Float[Tensor, "rows channels frames height width"],
    camera: Float[Tensor, "rows frames 12"],
) -> Float[Tensor, "rows channels frames height width"]:
    """The target's part of the transformer's pass on target and source joined, with poses for its blocks."""
    joined = torch.cat([latents, source], dim=2).to(transformer.patch_embedding.weight.dtype)
    tokens = transformer.patch_embedding(joined).flatten(2).transpose(1, 2).contiguous()
    per_frame = tokens.shape[1] // joined.shape[2]
    poses = torch.cat([camera, camera], dim=1).repeat_interleave(per_frame, dim=1)
    cos, sin = transformer.rope(joined)
    placed = RotaryAndPoses(cos, sin, poses)
    temb, modulation, text, _ = transformer.condition_embedder(timestep, text.to(tokens.dtype), None)
    modulation = modulation.unflatten(1, (6, -1))
    for block in transformer.blocks:
        if torch.is_grad_enabled() and transformer.gradient_checkpointing:
            tokens = transformer._gradient_checkpointing_func(block, tokens, text, modulation, placed)
        else:
            tokens = block(tokens, text, modulation, placed)
    shift, scale = (transformer.scale_shift_table + temb[:, None]).chunk(2, dim=1)
    tokens = (transformer.norm_out(tokens.float()) * (1 + scale) + shift).type_as(tokens)
    frames = latents.shape[2]
    return _unpatchify(transformer, transformer.proj_out(tokens[:, : frames * per_frame]), latents.shape)


def _unpatchify(transformer: WanTransformer3DModel, patches: Tensor, shape: torch.Size) -> Tensor:
    """Tokens laid out as frames again."""
    rows, _, frames, height, width = shape
    _, down, across = transformer.config.patch_size
    patches = patches.reshape(rows, frames, height // down, width // across, 1, down, across, -1)
    return patches.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)
