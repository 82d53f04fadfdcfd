"""Pipeline folders as diffusers saves them: the transformer on the device, all else off it until it is needed."""

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
            f"{folder} is no pipeline folder: it has no model_index.json. Give a folder that {expected}.save_pretrained"
            " has written, or that was downloaded from the hub."
        )
    found = json.loads(index.read_text()).get("_class_name")
    if found != expected:
        raise UserError(f"{folder} holds a {found}, but this model is loaded from a {expected}. Name another folder.")


def load_transformer(model_class: Any, folder: Path, dtype: str, device: torch.device) -> Any:
    """The transformer of a pipeline folder, frozen as it is, in eval mode."""
    transformer = model_class.from_pretrained(folder, subfolder="transformer", dtype=getattr(torch, dtype))
    return transformer.to(device).eval()


def load_pipeline_without_transformer(pipeline_class: Any, folder: Path, dtype: str) -> Any:
    """The pipeline without its transformer: text encoders and VAE, on the CPU."""
    pipeline = pipeline_class.from_pretrained(folder, transformer=None, dtype=getattr(torch, dtype))
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(False).eval()
    return pipeline


@contextmanager
def on_device(device: torch.device, *parts: nn.Module | None) -> Iterator[None]:
    """These parts are on the device meanwhile, and back on the CPU afterwards."""
    present = [part for part in parts if part is not None]
    try:
        for part in present:
            part.to(device)
        yield
    finally:
        for part in present:
            part.to("cpu")
