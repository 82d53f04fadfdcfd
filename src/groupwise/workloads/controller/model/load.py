"""A model to steer, by name: the embedded one, a folder, or a name on the hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from transformers.utils import cached_file

from groupwise.core.errors import UserError
from groupwise.workloads.controller.model.adapters import ModelAdapter, adapter_for, check_family
from groupwise.workloads.controller.model.images import ImageNormalization
from groupwise.workloads.controller.model.knobs import KnobOptions, default_options
from groupwise.workloads.hub import load_from_hub, resolve_model, stable_config

EMBEDDED = "mosaic"
_IMPORTANCE = "importance.json"
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class LoadedModel:
    """A model and all that is needed to ask it."""

    name: str
    model: Any
    adapter: ModelAdapter
    options: KnobOptions
    drop_order_is_measured: bool
    """False where nobody has stored an importance.json with the model: then it is a guess."""
    tokenizer: Any = None
    """None where the model came without one."""
    statistics: ImageNormalization | None = None
    """How its images are normalized; None where the model came without an image processor."""

    @cached_property
    def identity(self) -> str:
        """The key for what is remembered of this model: answers, latencies."""
        return weights_fingerprint(self.model)


def load_model(
    name: str | Path, *, dtype: torch.dtype | str = torch.float32, device: torch.device | str | None = None
) -> LoadedModel:
    """The model called "mosaic", the one in a folder, or the one of that name on the hub; on the accelerator if there
    is one and no device is named. `dtype` "auto" is the one that it was saved in.
    """
    device = device or default_device()
    if str(name) == EMBEDDED:
        from groupwise.workloads.controller.tasks.mosaic.model import load_mosaic
        from groupwise.workloads.controller.tasks.mosaic.task import mosaic_options

        model = load_mosaic(dtype=dtype if isinstance(dtype, torch.dtype) else torch.float32).to(device)
        return LoadedModel(EMBEDDED, model, adapter_for(model), mosaic_options(), drop_order_is_measured=True)
    source = _source(name)
    config = read_config(source)
    family = (config.architectures or [type(config).__name__])[0]
    check_family(family, config)
    model = _weights(source, family, dtype).to(device).eval()
    adapter, order = adapter_for(model), _drop_order(source)
    return LoadedModel(
        name=source,
        model=model,
        adapter=adapter,
        options=default_options(adapter, order),
        drop_order_is_measured=order is not None,
        tokenizer=_tokenizer(source),
        statistics=_statistics(source),
    )


def read_config(source: str) -> Any:
    """A model's configuration alone."""
    return _fetched(source, lambda: transformers.AutoConfig.from_pretrained(source, trust_remote_code=False))


def load_text_model(source: str) -> Any:
    """A model that writes and does not see, as it was saved."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    return _fetched(source, lambda: load(source, dtype="auto")).eval().to(default_device())


def default_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def weights_fingerprint(model: Any) -> str:
    """A hash of the model's class, its configuration and the bytes of all its weights: what answers depend on."""
    digest = hashlib.blake2b(type(model).__name__.encode(), digest_size=16)
    digest.update(stable_config(model).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name}{weight.dtype}{tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _source(name: str | Path) -> str:
    return resolve_model(
        name,
        no_folder=f"There is no folder {name}. Name a folder with a model, a name on the hub, or {EMBEDDED!r}.",
        no_model=f"The folder {name} holds no config.json, so no model: name one made by save_pretrained().",
    )


def _fetched(source: str, fetch: Callable[[], _Found]) -> _Found:
    return load_from_hub(source, fetch, called=f"The model {source!r}", remedy=f"; {EMBEDDED!r} is always there")


def _weights(source: str, family: str, dtype: torch.dtype | str) -> Any:
    load = getattr(transformers, family).from_pretrained
    model, info = _fetched(source, lambda: load(source, dtype=dtype, output_loading_info=True))
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"The model {source!r} lacks {len(missing)} of its weights, {missing[0]} among them: they would be random."
            " Fetch all files of the model again."
        )
    return model


def _part(source: str, *names: str) -> Path | None:
    """The first of these files that the model has."""
    for name in names:
        found = _fetched(
            source,
            lambda name=name: cached_file(  # type: ignore[misc]
                source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
            ),
        )
        if found is not None:
            return Path(found)
    return None


def _drop_order(source: str) -> Sequence[int] | None:
    file = _part(source, _IMPORTANCE)
    if file is None:
        return None
    found = _json(file).get("drop_order")
    if not isinstance(found, list) or not all(isinstance(block, int) for block in found):
        raise UserError(f"{file} holds no drop_order: it must be a list of blocks, the least important first.")
    return found


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except ValueError as fault:
        raise UserError(f"{file} is not JSON ({fault}). Mend it or take it away.") from fault
    return content if isinstance(content, dict) else {}


def _tokenizer(source: str) -> Any:
    if _part(source, "tokenizer_config.json", "tokenizer.json") is None:
        return None
    tokenizer = _fetched(source, lambda: transformers.AutoTokenizer.from_pretrained(source))
    if tokenizer.chat_template is None and (file := _part(source, "chat_template.json")):
        tokenizer.chat_template = _json(file).get("chat_template")
    return tokenizer


def _statistics(source: str) -> ImageNormalization | None:
    if _part(source, "preprocessor_config.json", "processor_config.json") is None:
        return None
    processor = _fetched(source, lambda: transformers.AutoImageProcessor.from_pretrained(source, backend="pil"))
    return ImageNormalization(tuple(processor.image_mean), tuple(processor.image_std))
