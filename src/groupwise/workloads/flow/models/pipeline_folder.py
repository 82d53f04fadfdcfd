"""Parts of a diffusers pipeline folder. Only the transformer stays on the device; the rest is moved there when used."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from groupwise.core.errors import UserError
from groupwise.dist.devices import move_module


def pipeline_class(folder: Path, known: Collection[str]) -> str:
    """The class of the pipeline in a folder; one that is not known is refused."""
    saved_class = str(read_index(folder).get("_class_name"))
    if saved_class not in known:
        raise UserError(
            f"{folder} holds a {saved_class}, and this recipe trains {' or '.join(sorted(known))}. Name another folder,"
            " or another recipe."
        )
    return saved_class


def read_index(folder: Path) -> dict[str, Any]:
    """The content of a pipeline's model_index.json."""
    index = folder / "model_index.json"
    if not index.is_file():
        raise UserError(
            f"{folder} is not a pipeline folder: it has no model_index.json. Give a folder written by a pipeline's"
            " save_pretrained or downloaded from the hub."
        )
    try:
        content: dict[str, Any] = json.loads(index.read_text())
    except ValueError as error:
        raise UserError(f"{index} is not JSON ({error}). Download the folder again.") from error
    return content


def load_transformer(
    model_class: Any, folder: Path, dtype: str, device: torch.device, name: str = "transformer"
) -> Any:
    """The transformer of a pipeline folder, on the device, in eval mode."""
    transformer = model_class.from_pretrained(folder, subfolder=name, dtype=getattr(torch, dtype), use_safetensors=True)
    return move_module(transformer, device).eval()


def load_pipeline_without_transformer(
    pipeline_class: Any, folder: Path, dtype: str, names: Sequence[str] = ("transformer",)
) -> Any:
    """Text encoders and VAE of a pipeline folder, frozen, on the CPU."""
    without: dict[str, Any] = dict.fromkeys(names)
    pipeline = pipeline_class.from_pretrained(folder, dtype=getattr(torch, dtype), use_safetensors=True, **without)
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(False).eval()
    return pipeline


def text_length(pipeline: Any) -> int:
    """Tokens of a prompt, as the pipeline itself encodes it when it is called."""
    length: int = inspect.signature(type(pipeline).__call__).parameters["max_sequence_length"].default
    return length


class PipelineSchedule:
    """The noise levels and timesteps of a pipeline's scheduler."""

    def __init__(self, scheduler: Any, *, tokens: int | None = None, explicit: bool = False):
        """`tokens` of a latent, where the schedule may depend on them. `explicit`: the pipeline passes 1 ... 1/n."""
        self._scheduler, self._explicit = scheduler, explicit
        self._mu = _shift_of_length(scheduler.config, tokens) if tokens is not None else None
        self._timesteps: dict[float, float] = {}

    def noise_levels(self, steps: int) -> list[float]:
        options: dict[str, Any] = {"sigmas": np.linspace(1.0, 1 / steps, steps)} if self._explicit else {}
        if self._scheduler.config.get("use_dynamic_shifting"):
            options["mu"] = self._mu
        self._scheduler.set_timesteps(None if self._explicit else steps, **options)
        levels: list[float] = self._scheduler.sigmas.tolist()
        self._timesteps |= zip(levels, self._scheduler.timesteps.tolist(), strict=False)
        return levels

    def timesteps(self, sigma: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """What the transformer gets: the scheduler's own (some are rounded), or 1000 sigma at other levels."""
        own = [self._timesteps.get(level) for level in sigma.tolist()]
        if None in own:
            return 1000 * sigma
        return torch.tensor(own, dtype=sigma.dtype, device=sigma.device)


def _shift_of_length(config: Any, tokens: int) -> float:
    """mu, linear in the tokens of a latent: base_shift at base_image_seq_len, max_shift at max_image_seq_len."""
    shortest, longest = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    low, high = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (high - low) / (longest - shortest)
    return float(tokens * slope + (low - slope * shortest))


def latent_image_size(height: int, width: int, factor: int) -> tuple[int, int]:
    """Height and width after a VAE that reduces both by `factor`; others are refused with the nearest that fit."""
    for name, value in (("height", height), ("width", width)):
        if value % factor or value < factor:
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
            move_module(part, device)
        yield
    finally:
        for part in present:
            move_module(part, "cpu")
