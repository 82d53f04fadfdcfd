"""The embedded image model: a small diffusers SD3 transformer that predicts clean latents from one-hot words."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from diffusers import SD3Transformer2DModel
from jaxtyping import Float
from torch import Tensor

from groupwise.workloads.flow.config import TrainedPartsConfig
from groupwise.workloads.flow.models.base import Conditioning, FlowModel
from groupwise.workloads.flow.models.image import Sd3Model
from groupwise.workloads.flow.models.small_folder import load_weights, read_config
from groupwise.workloads.flow.models.trained_parts import select_trained_parameters
from groupwise.workloads.flow.task import Condition, ConditionSpec
from groupwise.workloads.flow.tasks.discs.config import ASSET, LATENT_CHANNELS, LATENT_SIDE
from groupwise.workloads.flow.tasks.discs.scene import Images, Latents, Meanings, decode, encode_meanings, parse_prompts


class DiscsModel(FlowModel):
    """A FlowModel without text encoder and VAE."""

    def __init__(self, transformer: SD3Transformer2DModel, train: TrainedPartsConfig):
        self.policy = transformer
        patch = transformer.config.patch_size
        self.condition_spec = ConditionSpec((LATENT_CHANNELS, LATENT_SIDE, LATENT_SIDE), patch_size=(patch, patch))
        self._reference = select_trained_parameters(transformer, train)

    def encode(self, conditions: Sequence[Condition]) -> list[Conditioning]:
        columns = conditioning_of(parse_prompts([condition.prompt for condition in conditions]))
        return [{name: column[index] for name, column in columns.items()} for index in range(len(conditions))]

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        clean = predict_clean(self.policy, latents, sigma, conditioning)
        return (latents - clean) / sigma.view(-1, 1, 1, 1)

    def decode(self, latents: Tensor) -> Images:
        return decode(latents.float().cpu())

    def reference(self) -> AbstractContextManager[None]:
        return self._reference()


def predict_clean(
    transformer: SD3Transformer2DModel, latents: Latents, sigma: Float[Tensor, " rows"], conditioning: Conditioning
) -> Latents:
    """The transformer's output: at high noise levels clean latents are easier to learn than velocities."""
    return Sd3Model.transform(transformer, latents, 1000 * sigma, conditioning).float()


def conditioning_of(meanings: Meanings) -> Conditioning:
    """What the transformer is given of prompts: their words, and the set of them."""
    text = encode_meanings(meanings)
    return {"text": text, "pooled": text.sum(1)}


def load_discs(folder: Path = ASSET) -> SD3Transformer2DModel:
    """The pretrained transformer."""
    transformer = SD3Transformer2DModel.from_config(read_config(folder))
    load_weights(transformer, folder)
    return transformer.eval()
