"""Camera layers for diffusers' Wan transformer, as ReCamMaster has them (Bai et al., arXiv 2503.11647).

The source clip's latents follow the target's on the frame axis. In every block a linear layer encodes the poses, which
are added to the tokens before self-attention; a projector follows the attention. The encoder starts at zero and the
projector as the identity, so a fresh model is bit-identical to the base model on the concatenated clip.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from jaxtyping import Float
from torch import Tensor, nn

from groupwise.core.errors import UserError
from groupwise.dist.deferred_weights import is_deferred

POSE_DIM = 12


class RotaryAndPoses(NamedTuple):
    """A block's `rotary_emb` argument, which it passes to its self-attention unchanged: the poses travel with it."""

    cosines: Tensor
    sines: Tensor
    poses: Float[Tensor, "rows tokens 12"]


class CameraAttention(nn.Module):
    """An attention processor with the two camera layers of its block. They stay in float32: they are trained."""

    def __init__(self, width: int):
        super().__init__()
        self.pose_encoder = nn.Linear(POSE_DIM, width)
        self.projector = nn.Linear(width, width)
        nn.init.zeros_(self.pose_encoder.weight)
        nn.init.zeros_(self.pose_encoder.bias)
        nn.init.eye_(self.projector.weight)
        nn.init.zeros_(self.projector.bias)
        self._base = WanAttnProcessor()

    def forward(
        self,
        attention: nn.Module,
        tokens: Float[Tensor, "rows tokens width"],
        encoder_tokens: Tensor | None,
        mask: Tensor | None,
        rotary_and_poses: RotaryAndPoses,
    ) -> Float[Tensor, "rows tokens width"]:
        cosines, sines, poses = rotary_and_poses
        dtype = self.projector.weight.dtype
        posed = tokens + self.pose_encoder(poses.to(dtype)).to(tokens.dtype)
        attended = self._base(attention, posed, encoder_tokens, mask, (cosines, sines))
        return self.projector(attended.to(dtype)).to(tokens.dtype)


def add_camera_layers(transformer: WanTransformer3DModel) -> None:
    """Add camera layers to every block; the base weights keep their names."""
    if transformer.config.patch_size[0] != 1:
        raise UserError(
            f"The transformer's patch_size is {tuple(transformer.config.patch_size)}: camera layers need patches of one"
            " frame, so that every token has one pose. Take a model with patch_size (1, height, width)."
        )
    width = transformer.config.num_attention_heads * transformer.config.attention_head_dim
    for block in transformer.blocks:
        block.attn1.set_processor(CameraAttention(width).to("cpu" if is_deferred(transformer) else transformer.device))


def camera_weights(transformer: WanTransformer3DModel) -> dict[str, nn.Parameter]:
    """The weights of the camera layers, by name."""
    return {name: weight for name, weight in transformer.named_parameters() if ".attn1.processor." in name}


def camera_velocity(
    transformer: WanTransformer3DModel,
    latents: Float[Tensor, "rows channels frames height width"],
    timestep: Float[Tensor, " rows"],
    text: Float[Tensor, "rows words text_dim"],
    source: Float[Tensor, "rows channels frames height width"],
    camera: Float[Tensor, "rows frames 12"],
) -> Float[Tensor, "rows channels frames height width"]:
    """The velocity of the target frames, from a pass over target and source together."""
    clip = torch.cat([latents, source], dim=2).to(transformer.patch_embedding.weight.dtype)
    tokens = transformer.patch_embedding(clip).flatten(2).transpose(1, 2).contiguous()
    tokens_per_frame = tokens.shape[1] // clip.shape[2]
    poses = torch.cat([camera, camera[:, : source.shape[2]]], dim=1).repeat_interleave(tokens_per_frame, dim=1)
    cosines, sines = transformer.rope(clip)
    rotary_and_poses = RotaryAndPoses(cosines, sines, poses)
    temb, modulation, text, _ = transformer.condition_embedder(timestep, text.to(tokens.dtype), None)
    modulation = modulation.unflatten(1, (6, -1))
    for block in transformer.blocks:
        if torch.is_grad_enabled() and transformer.gradient_checkpointing:
            tokens = transformer._gradient_checkpointing_func(block, tokens, text, modulation, rotary_and_poses)
        else:
            tokens = block(tokens, text, modulation, rotary_and_poses)
    shift, scale = (transformer.scale_shift_table + temb[:, None]).chunk(2, dim=1)
    tokens = (transformer.norm_out(tokens.float()) * (1 + scale) + shift).type_as(tokens)
    target = tokens[:, : latents.shape[2] * tokens_per_frame]
    return _unpatchify(transformer, transformer.proj_out(target), latents.shape)


def _unpatchify(transformer: WanTransformer3DModel, patches: Tensor, shape: torch.Size) -> Tensor:
    """Tokens back into frames."""
    rows, _, frames, height, width = shape
    _, patch_height, patch_width = transformer.config.patch_size
    patches = patches.reshape(
        rows, frames, height // patch_height, width // patch_width, 1, patch_height, patch_width, -1
    )
    return patches.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)
