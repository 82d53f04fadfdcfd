"""Clips whose latents are pixels: conditions of five frames of 8 x 8, and a model for them without a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from groupwise.core.randomness import uniform
from groupwise.workloads.flow.data.cameras import motion_to_pose
from groupwise.workloads.flow.models.base import NEGATIVE_PREFIX, Conditioning, FlowModel
from groupwise.workloads.flow.models.camera_layers import camera_velocity
from groupwise.workloads.flow.models.trained_parts import InitialWeights
from groupwise.workloads.flow.task import Condition, ConditionSpec

SHAPE = (3, 5, 8, 8)
PROMPTS = ("", "by day", "at dusk", "by night")


def pixel_conditions(numbers: Tensor) -> list[Condition]:
    """Noise as source clips, straight camera paths, one of three prompts, and a column that JSON cannot hold."""
    pixels = 2 * uniform(3, 0, numbers[:, None], 0, 0, torch.arange(torch.Size(SHAPE).numel())).float() - 1
    ends = 0.3 * (2 * uniform(3, 1, numbers[:, None], 0, 0, torch.arange(6)).float() - 1)
    motions = ends[:, None] * torch.linspace(0, 1, SHAPE[1])[None, :, None]
    return [
        Condition(
            PROMPTS[1 + number % 3],
            clip.view(SHAPE),
            motion_to_pose(motion),
            name=f"clip {number}",
            reward_columns={"scene": object()},
        )
        for number, clip, motion in zip(numbers.tolist(), pixels, motions, strict=True)
    ]


class PixelClipModel(FlowModel):
    """Without text encoder and decoder."""

    def __init__(self, transformer: WanTransformer3DModel):
        self.policy = transformer
        self.condition_spec = ConditionSpec(
            latent_shape=SHAPE,
            patch_size=tuple(transformer.config.patch_size),
            source_frames=SHAPE[1],
            source_size=SHAPE[2:],
            has_camera=True,
        )
        self._initial = InitialWeights(transformer)

    def encode(self, conditions: Sequence[Condition]) -> list[Conditioning]:
        return [
            {
                "text": _one_hot(condition.prompt),
                f"{NEGATIVE_PREFIX}text": _one_hot(""),
                "source": condition.source_clip,
                "camera": condition.camera,
            }
            for condition in conditions
        ]

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        return camera_velocity(self.policy, latents, 1000 * sigma, **conditioning).float()

    def decode(self, latents: Tensor) -> Tensor:
        return latents.float().cpu()

    def reference(self) -> AbstractContextManager[None]:
        return self._initial.swapped_in()


def _one_hot(prompt: str) -> Tensor:
    """Two of the 8 words that the tiny transformer knows."""
    number = PROMPTS.index(prompt)
    return torch.nn.functional.one_hot(torch.tensor([number, number + 4]), 8).float()
