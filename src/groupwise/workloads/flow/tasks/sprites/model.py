"""The embedded model: a small diffusers Wan transformer with camera layers, over latents with a fixed decoder."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from diffusers import WanTransformer3DModel
from torch import Tensor

from groupwise.workloads.flow.config import TrainedPartsConfig
from groupwise.workloads.flow.models.base import NEGATIVE_PREFIX, Conditioning, FlowModel
from groupwise.workloads.flow.models.camera_layers import add_camera_layers, camera_velocity
from groupwise.workloads.flow.models.small_folder import load_weights, read_config
from groupwise.workloads.flow.models.trained_parts import select_trained_parameters
from groupwise.workloads.flow.task import Condition, ConditionSpec
from groupwise.workloads.flow.tasks.sprites.config import ASSET, FRAMES, LATENT_CHANNELS, LATENT_SIDE, SIDE
from groupwise.workloads.flow.tasks.sprites.latents import Clips, Latents, decode, encode_source
from groupwise.workloads.flow.tasks.sprites.scene import encode_prompts

_MIN_SIGMA = 0.05
"""Below it the velocity of a predicted clip would be divided by almost nothing."""


class SpritesModel(FlowModel):
    """Without text encoder and VAE: words are one-hot, latents are painted by a formula."""

    def __init__(self, transformer: WanTransformer3DModel, train: TrainedPartsConfig | None = None):
        self.policy = transformer
        self.condition_spec = ConditionSpec(
            latent_shape=(LATENT_CHANNELS, FRAMES, LATENT_SIDE, LATENT_SIDE),
            patch_size=tuple(transformer.config.patch_size),
            source_frames=1,
            source_size=(SIDE, SIDE),
            has_camera=True,
        )
        self._reference = select_trained_parameters(transformer, train or TrainedPartsConfig(part="all"))

    def encode(self, conditions: Sequence[Condition]) -> list[Conditioning]:
        return [self._encode(condition) for condition in conditions]

    def _encode(self, condition: Condition) -> Conditioning:
        assert condition.source_clip is not None
        assert condition.camera is not None
        text, negative = encode_prompts([condition.prompt, ""])
        (source,) = encode_source(condition.source_clip[None, :, :1])
        return {"text": text, f"{NEGATIVE_PREFIX}text": negative, "source": source, "camera": condition.camera.float()}

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        clean = predict_clean(self.policy, latents, sigma, conditioning)
        return (latents - clean) / sigma.clamp(min=_MIN_SIGMA).view(-1, 1, 1, 1, 1)

    def decode(self, latents: Latents) -> Clips:
        return decode(latents.float()).cpu()

    def reference(self) -> AbstractContextManager[None]:
        return self._reference()


def predict_clean(
    transformer: WanTransformer3DModel, latents: Latents, sigma: Tensor, conditioning: Conditioning
) -> Latents:
    """The transformer's output: the clean latents. A patch's velocity is noise that its width could not hold."""
    return camera_velocity(transformer, latents, 1000 * sigma, **conditioning).float()


def load_sprites(folder: Path = ASSET / "base") -> WanTransformer3DModel:
    """A pretrained transformer with its camera layers, in float32."""
    transformer = WanTransformer3DModel.from_config(read_config(folder))
    add_camera_layers(transformer)
    load_weights(transformer, folder)
    return transformer.eval()
