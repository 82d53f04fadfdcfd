"""The embedded model: a small diffusers Wan transformer with camera layers, whose latents are pixels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from diffusers import WanTransformer3DModel
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor

from groupwise.workloads.flow.models.base import NEGATIVE_PREFIX, Conditioning, FlowModel
from groupwise.workloads.flow.models.camera_layers import add_camera_layers, camera_velocity
from groupwise.workloads.flow.models.trained_parts import InitialWeights
from groupwise.workloads.flow.task import Condition, ConditionSpec
from groupwise.workloads.flow.tasks.plane.config import ASSET, COLORS, FRAMES, SIDE
from groupwise.workloads.flow.tasks.plane.scene import encode_prompts


class PlaneModel(FlowModel):
    """A FlowModel without text encoder and VAE: words are one-hot and latents are pixels."""

    def __init__(self, transformer: WanTransformer3DModel):
        self.policy = transformer
        self.condition_spec = ConditionSpec(
            latent_shape=(COLORS, FRAMES, SIDE, SIDE),
            patch_size=tuple(transformer.config.patch_size),
            source_frames=FRAMES,
            source_size=(SIDE, SIDE),
            has_camera=True,
        )
        self._initial = InitialWeights(transformer)

    def encode(self, conditions: Sequence[Condition]) -> list[Conditioning]:
        return [self._encode(condition) for condition in conditions]

    def _encode(self, condition: Condition) -> Conditioning:
        assert condition.source_clip is not None
        assert condition.camera is not None
        text, negative = encode_prompts([condition.prompt, ""])
        source = condition.source_clip[:, :FRAMES]
        return {"text": text, f"{NEGATIVE_PREFIX}text": negative, "source": source, "camera": condition.camera.float()}

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        return camera_velocity(self.policy, latents, 1000 * sigma, **conditioning).float()

    def decode(self, latents: Tensor) -> Float[Tensor, "rows colors frames side side"]:
        return latents.float().cpu()

    def reference(self) -> AbstractContextManager[None]:
        return self._initial.swapped_in()


def load_plane(folder: Path = ASSET) -> WanTransformer3DModel:
    """The pretrained transformer, with its camera layers."""
    transformer = WanTransformer3DModel.from_config(json.loads((folder / "config.json").read_text()))
    add_camera_layers(transformer)
    weights = load_file(folder / "model.safetensors")
    transformer.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return transformer.eval()


def save_plane(transformer: WanTransformer3DModel, folder: Path) -> None:
    """Its config as diffusers writes it, and all weights in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    transformer.save_config(folder)
    weights = {name: weight.detach().cpu().contiguous() for name, weight in transformer.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
