"""Weights that stay in their files until the model is sharded: then each rank reads its own rows of them alone.

While `deferring_weights` is on, a loader may build its model `without_weights` and name their files with
`defer_weights`. `load_deferred` reads them once the model is sharded. Code that needs the weights earlier says what to
do `after_loading`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from groupwise.core.io.files import read_json
from groupwise.core.io.tensor_files import TensorFiles
from groupwise.dist.devices import names_by_tensor
from groupwise.dist.sharded_files import TensorSource, read_into

_deferring: ContextVar[bool] = ContextVar("deferring_weights", default=False)
_SOURCES = "deferred_weights"
"""The attribute of a model that was built without weights: where each is to be read from, by its name then."""
_AFTER_LOADING = "after_deferred_weights"
"""The attribute of a module with the functions that wait for its weights."""
_BASE_LAYER = ".base_layer"
"""What PEFT adds to the names of weights that get an adapter."""


@dataclass
class HeldTensors:
    """Tensors by name, such as those that torch maps from a file into memory."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        return self.tensors[name] if rows is None else self.tensors[name][rows]


@contextmanager
def deferring_weights(on: bool) -> Iterator[None]:
    """Within it loaders may leave weights in their files."""
    token = _deferring.set(on)
    try:
        yield
    finally:
        _deferring.reset(token)


def defers_weights() -> bool:
    return _deferring.get()


def is_deferred(model: nn.Module) -> bool:
    return any(weight.is_meta for weight in model.parameters())


def without_weights() -> AbstractContextManager[Any]:
    """Models that are built within it have weights without memory (on torch's meta device), and real buffers."""
    return init_empty_weights(include_buffers=False)


def files_in(folder: Path, name: str) -> TensorFiles | None:
    """The tensors of NAME.safetensors, or of the files that NAME.safetensors.index.json lists; None without either."""
    single, index = folder / f"{name}.safetensors", folder / f"{name}.safetensors.index.json"
    if single.is_file():
        return TensorFiles([(single.resolve(), "")])
    if not index.is_file():
        return None
    listed = read_json(index.resolve()).get("weight_map")
    names = sorted({str(file) for file in listed.values()}) if isinstance(listed, dict) else []
    paths = [folder / file for file in names]
    return TensorFiles((path.resolve(), "") for path in paths) if all(path.is_file() for path in paths) else None


def defer_weights(model: nn.Module, files: TensorFiles) -> bool:
    """Whether the files hold all weights of a model that was built without them, by its names and in its shapes."""
    persistent = set(model.state_dict())
    ties = {name: same for same in names_by_tensor(model) for name in same}
    sources: dict[str, tuple[TensorSource, str]] = {}
    tensors = [*model.named_parameters(), *((name, b) for name, b in model.named_buffers() if name in persistent)]
    for name, tensor in tensors:
        saved = next((each for each in (name, *ties.get(name, ())) if each in files), None)
        if saved is None or files.shape(saved) != tensor.shape:
            return False
        sources[name] = files, saved
    if not set(files) <= {*sources, *ties}:
        return False
    setattr(model, _SOURCES, sources)
    return True


def defer_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Other values for weights that are deferred, by name."""
    held = HeldTensors(tensors)
    getattr(model, _SOURCES).update({name: (held, name) for name in tensors})


def after_loading(model: nn.Module, function: Callable[[], None]) -> None:
    """Call a function once the weights of the model are there."""
    model.__dict__.setdefault(_AFTER_LOADING, []).append(function)


@contextmanager
def stand_ins_for_deferred(model: nn.Module) -> Iterator[None]:
    """Within it deferred weights look as if they were on the host: each is one number, repeated without memory."""
    deferred = {id(weight): weight for weight in model.parameters() if weight.is_meta}
    stand_ins = {
        key: nn.Parameter(torch.zeros((), dtype=weight.dtype).expand(weight.shape), requires_grad=weight.requires_grad)
        for key, weight in deferred.items()
    }
    _replace_weights(model, stand_ins)
    try:
        yield
    finally:
        _replace_weights(model, {id(stand_ins[key]): weight for key, weight in deferred.items()})


def _replace_weights(model: nn.Module, by_id: Mapping[int, nn.Parameter]) -> None:
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and id(weight) in by_id:
                module._parameters[name] = by_id[id(weight)]


@torch.no_grad()
def load_deferred(model: nn.Module, device: torch.device) -> None:
    """Give a sharded model its memory and read this rank's rows of its deferred weights."""
    if not is_deferred(model):
        return
    sources = _sources(model)
    deferred = {name for name, weight in model.named_parameters() if weight.is_meta}
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in sources}
    for name, target in (*model.named_parameters(), *buffers.items()):
        if name in deferred or name in buffers:
            read_into(target, *sources[name])


def weights_are_loaded(model: nn.Module) -> None:
    """Call what waits for the weights of the model or a part of it."""
    for module in list(model.modules()):
        for function in module.__dict__.pop(_AFTER_LOADING, ()):
            function()


def _sources(model: nn.Module) -> dict[str, tuple[TensorSource, str]]:
    """Where each weight comes from, by its name now: loaded models may be parts of this one, with adapters since."""
    sources: dict[str, tuple[TensorSource, str]] = {}
    for prefix, module in model.named_modules():
        loaded: Mapping[str, tuple[TensorSource, str]] = module.__dict__.get(_SOURCES, {})
        if loaded:
            for name in (*dict(module.named_parameters()), *dict(module.named_buffers())):
                source = loaded.get(name.replace(_BASE_LAYER, ""))
                if source is not None:
                    sources[f"{prefix}.{name}" if prefix else name] = source
    return sources
