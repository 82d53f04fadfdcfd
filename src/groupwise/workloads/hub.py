"""Load a model from a folder or the hub, with readable errors; the part of its configuration that identifies it."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import constants
from transformers.utils import logging

from groupwise.core.errors import UserError, is_out_of_memory
from groupwise.core.io.files import open_regular, read_json

_Loaded = TypeVar("_Loaded")
_LARGE_BYTES = 100 * 2**20  # of weights: below, loading takes no noticeable time
_CONNECT_S = 5.0
"""Longest wait for the hub."""
_MOST_LAYERS = 10_000
"""Of a model: also of experts in a layer."""
_READ = (".json", ".safetensors", ".jinja", ".txt", ".model")
_UNSTABLE_KEYS = ("transformers_version", "dtype")


def resolve_model(name: str | Path, *, no_folder: str, no_model: str) -> str:
    """The folder or the name on the hub; a folder that is missing or has no model is refused with the given message."""
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(no_model)
        return str(path)
    if isinstance(name, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(no_folder)
    return name


def load_from_hub(source: str, load: Callable[[], _Loaded], *, called: str, remedy: str = "") -> _Loaded:
    """What `load` returns for a source; its errors become a message about `called`."""
    if Path(source).is_dir():
        _refuse_unreadable(Path(source))
    offline = not Path(source).is_dir() and _use_cache_alone_when_offline()
    with _progress_bar_for_large_models(source):
        try:
            return load()
        except Exception as error:  # a stranger's files lead transformers to any kind
            if isinstance(error, UserError) or is_out_of_memory(error):
                raise
            cache = (
                "in the local cache, not on the hub, which cannot be reached"
                if offline
                else "in the local cache and on the hub"
            )
            where = "in this folder" if Path(source).is_dir() else cache
            raise UserError(
                f"{called} cannot be loaded; it was looked for {where}. transformers says:"
                f" {' '.join(str(error).split())[:400]} Check the name and the network, or download the model and name"
                f" its folder{remedy}."
            ) from error


def _refuse_unreadable(folder: Path) -> None:
    """Before transformers waits for a pipe, or builds as many layers as a config.json may name."""
    for path in (entry for entry in folder.iterdir() if entry.suffix in _READ):
        open_regular(path, follow_links=True).close()
    if (folder / "config.json").exists():
        config = read_json(folder / "config.json", follow_links=True)
        name, count = max(_counts(config), key=lambda entry: entry[1], default=("", 0))
        if count > _MOST_LAYERS:
            raise UserError(
                f"{folder / 'config.json'} has {name} {count}: a model has at most {_MOST_LAYERS:,}. Restore the file."
            )


def _counts(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """How many layers, blocks or experts of each kind a configuration names."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _counts(value)
        elif isinstance(value, int) and any(word in name for word in ("layer", "block", "expert", "depth")):
            yield name, value


def _use_cache_alone_when_offline() -> bool:
    """Whether the hub cannot be reached: then its library answers from the cache at once, instead of retrying for a
    minute. Behind a proxy nothing is tried."""
    if constants.HF_HUB_OFFLINE or any(urllib.request.getproxies().get(kind) for kind in ("http", "https", "all")):
        return bool(constants.HF_HUB_OFFLINE)
    hub = urllib.parse.urlsplit(constants.ENDPOINT)
    address = hub.hostname or "", hub.port or (80 if hub.scheme == "http" else 443)
    reached: list[bool] = []

    def connect() -> None:
        with suppress(OSError), socket.create_connection(address, timeout=_CONNECT_S):
            reached.append(True)

    attempt = threading.Thread(target=connect, daemon=True)  # looking up a name has no time limit of its own
    attempt.start()
    attempt.join(_CONNECT_S)
    constants.HF_HUB_OFFLINE = not reached
    return not reached


def stable_config(model: Any, *, ignore: tuple[str, ...] = ()) -> str:
    """A model's configuration as JSON, without what says where and by which version of transformers it was loaded."""
    unstable = (*_UNSTABLE_KEYS, *ignore)

    def select(value: Any) -> Any:
        if isinstance(value, dict):
            kept = {key: part for key, part in value.items() if not str(key).startswith("_") and key not in unstable}
            return {key: select(part) for key, part in kept.items()}
        return [select(part) for part in value] if isinstance(value, list | tuple) else value

    return json.dumps(select(model.config.to_dict()), sort_keys=True, default=str)


@contextmanager
def _progress_bar_for_large_models(source: str) -> Iterator[None]:
    weights = sum(file.stat().st_size for file in Path(source).glob("*.safetensors")) if Path(source).is_dir() else None
    if weights is None or weights > _LARGE_BYTES or not logging.is_progress_bar_enabled():
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
    digest.update(stable_config(model).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name}{weight.dtype}{tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
