"""Models of other people's making: found by folder or name, fetched, and told of in plain words where they are not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from transformers.utils import logging

from groupwise.core.errors import UserError

_Found = TypeVar("_Found")
_LOADS_AT_ONCE = 100 * 2**20  # bytes of weights


def resolve_model(name: str | Path, *, no_folder: str, no_model: str) -> str:
    """The folder or the name on the hub, with what to tell a user who names a folder that is not there or is empty."""
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(no_model)
        return str(path)
    if isinstance(name, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(no_folder)
    return name


def load_from_hub(source: str, fetch: Callable[[], _Found], *, called: str, remedy: str = "") -> _Found:
    """What `fetch` finds at a source; a model that loads at once does so without transformers' progress bar."""
    with _progress_bar_for_large_models(source):
        try:
            return fetch()
        except (OSError, ValueError, KeyError, SafetensorError) as fault:
            where = "in this folder" if Path(source).is_dir() else "in the local cache and on the hub"
            raise UserError(
                f"{called} cannot be loaded; it was looked for {where}. transformers says:"
                f" {' '.join(str(fault).split())[:400]} Check the name and the network, or download the model and name"
                f" its folder{remedy}."
            ) from fault


@contextmanager
def _progress_bar_for_large_models(source: str) -> Iterator[None]:
    weights = sum(file.stat().st_size for file in Path(source).glob("*.safetensors")) if Path(source).is_dir() else None
    if weights is None or weights > _LOADS_AT_ONCE or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def weights_fingerprint(model: Any) -> str:
    """A hash of the model's class, configuration and weights: everything that its outputs depend on."""
    digest = hashlib.blake2b(type(model).__name__.encode(), digest_size=16)
    digest.update(json.dumps(stable_config(model.config.to_dict()), sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name}{weight.dtype}{tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def stable_config(config: Any) -> Any:
    """A transformers configuration without the entries that depend on where, how and by which version it was loaded."""
    transient = ("transformers_version", "dtype", "architectures")
    if isinstance(config, dict):
        kept = [name for name in config if not str(name).startswith("_") and name not in transient]
        return {name: stable_config(config[name]) for name in kept}
    return [stable_config(entry) for entry in config] if isinstance(config, list | tuple) else config
