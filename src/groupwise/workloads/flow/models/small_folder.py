"""Folders of the small transformers of embedded tasks: config.json, and all weights in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers.models.modeling_utils import ModelMixin
from safetensors.torch import load_file, save_file

from groupwise.core.errors import UserError
from groupwise.core.io.files import read_json

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"


def read_config(folder: Path) -> dict[str, Any]:
    """The transformer's config; an error where the folder does not hold such a model."""
    missing = [name for name in (_CONFIG, _WEIGHTS) if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"workload.model is {folder}, which holds no {' and no '.join(missing)}. Name a folder that the task's tool"
            " has written (python -m tools.sprites or tools.discs), or leave it out for the embedded model."
        )
    return read_json(folder / _CONFIG, follow_links=True)


def load_weights(transformer: ModelMixin, folder: Path) -> None:
    """Into a transformer of this config, in float32."""
    weights = load_file(folder / _WEIGHTS)
    transformer.load_state_dict({name: weight.float() for name, weight in weights.items()})


def save_transformer(transformer: ModelMixin, folder: Path) -> None:
    """Its config as diffusers writes it, and its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    transformer.save_config(folder)
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous()
        for name, weight in transformer.state_dict().items()
    }
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})
