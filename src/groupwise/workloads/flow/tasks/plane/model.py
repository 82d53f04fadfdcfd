"""The embedded model: diffusers' Wan transformer with camera layers, small enough to ship, on pixels as latents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from diffusers import WanTransformer3DModel
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor

from groupwise.workloads.flow.models.base import NEGATIVE_PREFIX, Conditioning
from groupwise.workloads.flow.models.camera_layers import add_camera_layers, camera_velocity
from groupwise.workloads.flow.models.trained_parts import InitialWeights
from groupwise.workloads.flow.task import Condition, ConditionSpec
from groupwise.workloads.flow.tasks.plane.scene import COLOURS, FRAMES, SIDE, check_prompt, encode

ASSET = Path(__file__).parent / "asset"


class PlaneModel:
    """Follows the FlowModel protocol; words are one-hot and latents are pixels, so nothing else has to be loaded."""

    def __init__(self, transformer: WanTransformer3DModel):
        self.policy = transformer
        self.asked = ConditionSpec(
            latent=(COLOURS, FRAMES, SIDE, SIDE),
            patch=tuple(transformer.config.patch_size),
            source_frames=FRAMES,
            source_size=(SIDE, SIDE),
            has_camera=True,
        )
        self._first = InitialWeights(transformer)

    def encode(self, conditions: Sequence[Condition]) -> list[Conditioning]:
        (nothing,) = encode([""])
        found: list[Conditioning] = []
        for condition in conditions:
            check_prompt(condition.prompt)
            assert condition.source is not None
            assert condition.camera is not None
            (words,) = encode([condition.prompt])
            source = condition.source[:, :FRAMES]
            found.append(
                {"text": words, f"{NEGATIVE_PREFIX}text": nothing, "source": source, "camera": condition.camera.float()}
            )
        return found

    def velocity(self, latents: Tensor, sigma: Tensor, encoding: Conditioning) -> Tensor:
        return camera_velocity(self.policy, latents, 1000 * sigma, **encoding).float()

    def decode(self, latents: Tensor) -> Float[Tensor, "rows colors frames side side"]:
        return latents.float().cpu()

    def reference(self) -> AbstractContextManager[None]:
        return self._first.lent()


def load_plane(folder: Path = ASSET) -> WanTransformer3DModel:
    """The pretrained transformer, with its camera layers."""
    transformer = WanTransformer3DModel.from_config(json.loads((folder / "config.json").read_text()))
    add_camera_layers(transformer)
    transformer.load_state_dict(
        {name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()}
    )
    return transformer.eval()


def save_plane(transformer: WanTransformer3DModel, folder: Path) -> None:
    """Its config as diffusers writes it, and all weights in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    transformer.save_config(folder)
    weights = {name: weight.detach().cpu().contiguous() for name, weight in transformer.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
