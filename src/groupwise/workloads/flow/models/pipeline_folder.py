"""Parts of a diffusers pipeline folder. Only the transformer stays on the device; the rest is moved there when used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from groupwise.core.errors import UserError


def check_pipeline(folder: Path, expected: str) -> None:
    """Refuse a folder that does not hold a pipeline of this class."""
    index = folder / "model_index.json"
    if not index.is_file():
        raise UserError(
            f"{folder} is not a pipeline folder: it has no model_index.json. Give a folder written by"
            f" {expected}.save_pretrained or downloaded from the hub."
        )
    saved_class = json.loads(index.read_text()).get("_class_name")
    if saved_class != expected:
        raise UserError(
            f"{folder} holds a {saved_class}, but this model is loaded from a {expected}. Name another folder."
        )


def load_transformer(model_class: Any, folder: Path, dtype: str, device: torch.device) -> Any:
    """The transformer of a pipeline folder, on the device, in eval mode."""
    transformer = model_class.from_pretrained(
        folder, subfolder="transformer", dtype=getattr(torch, dtype), use_safetensors=True
    )
    return transformer.to(device).eval()


def load_pipeline_without_transformer(pipeline_class: Any, folder: Path, dtype: str) -> Any:
    """Text encoders and VAE of a pipeline folder, frozen, on the CPU."""
    pipeline = pipeline_class.from_pretrained(
        folder, transformer=None, dtype=getattr(torch, dtype), use_safetensors=True
    )
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(False).eval()
    return pipeline


def latent_image_size(height: int, width: int, factor: int) -> tuple[int, int]:
    """Height and width after a VAE that reduces both by `factor`; others are refused with the nearest that fit."""
    for name, value in (("height", height), ("width", width)):
        if value % factor:
            lower = value // factor * factor
            nearest = " or ".join(str(size) for size in (lower, lower + factor) if size)
            raise UserError(f"workload.{name} is {value}: the VAE needs a multiple of {factor}. Take {nearest}.")
    return height // factor, width // factor


@contextmanager
def on_device(device: torch.device, *parts: nn.Module | None) -> Iterator[None]:
    """Within this context these parts are on the device; afterwards they are on the CPU again."""
    present = [part for part in parts if part is not None]
    try:
        for part in present:
            part.to(device)
        yield
    finally:
        for part in present:
            part.to("cpu")
