"""LoadedModel: a model with its adapter, knobs and front end; from a folder, the hub, or the embedded models."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from transformers.utils import cached_file

from groupwise.core.errors import UserError
from groupwise.core.io.files import read_json
from groupwise.dist.devices import default_device, move_module
from groupwise.workloads.controller.model.adapters import ModelAdapter, adapter_for, check_family, default_options
from groupwise.workloads.controller.model.images import ImageNormalization
from groupwise.workloads.controller.model.inputs import FrontEnd, TransformersFrontEnd
from groupwise.workloads.controller.model.knobs import KnobOptions
from groupwise.workloads.controller.model.molmoe.modeling import MolmoeConfig
from groupwise.workloads.controller.model.molmoe.sizes import is_molmo, read_sizes
from groupwise.workloads.controller.model.molmoe.tokenizer import read_normalization, read_tokenizer
from groupwise.workloads.controller.model.molmoe.weights import load_weights
from groupwise.workloads.controller.model.self_check import check_model
from groupwise.workloads.controller.tasks import EMBEDDED_MODELS
from groupwise.workloads.hub import load_from_hub, resolve_model, weights_fingerprint

_IMPORTANCE_FILE = "importance.json"
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class LoadedModel:
    """A model and everything that is needed to ask it."""

    name: str
    model: Any
    adapter: ModelAdapter
    options: KnobOptions
    drop_order_is_measured: bool
    """False where no importance.json is stored with the model: the drop order is then published or a guess."""
    tokenizer: Any = None
    """None where the model came without one."""
    normalization: ImageNormalization | None = None
    """None where the model came without an image processor."""
    exif_orientation: bool = True
    """Images are rotated as their EXIF data says."""
    make_front_end: Callable[[LoadedModel], FrontEnd] = TransformersFrontEnd

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the model in caches of answers and latencies."""
        return weights_fingerprint(self.model)

    @cached_property
    def front_end(self) -> FrontEnd:
        return self.make_front_end(self)


def load_model(
    name: str | Path,
    *,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str | None = None,
    published_crop_rule: bool = False,
) -> LoadedModel:
    """An embedded model by its name, or one in a folder or on the hub; by default on the accelerator if there is one.
    `dtype` "auto" is the one that it was saved in. `published_crop_rule` is MolmoE's: see `MolmoeModel`. A model that
    the executor would answer wrongly is refused.
    """
    device = device or default_device()
    if str(name) in EMBEDDED_MODELS:
        load: Callable[..., LoadedModel] = pkgutil.resolve_name(EMBEDDED_MODELS[str(name)])
        return load(dtype=dtype if isinstance(dtype, torch.dtype) else torch.float32, device=device)
    source = _source(name)
    config = read_config(source)
    if isinstance(config, MolmoeConfig):
        config.published_crop_rule = published_crop_rule
        return _load_molmoe(source, config, dtype, device)
    if published_crop_rule:
        raise UserError(
            f"published_crop_rule is a rule of MolmoE alone, and {source!r} is another model. Leave it out."
        )
    family = (config.architectures or [type(config).__name__])[0]
    check_family(family, config)
    model = move_module(_weights(source, family, dtype), device).eval()
    return _loaded(source, model, _tokenizer(source), _normalization(source))


def _load_molmoe(
    source: str, config: MolmoeConfig, dtype: torch.dtype | str, device: torch.device | str
) -> LoadedModel:
    """As published: no code of the folder is run, and nothing is unpickled."""
    sizes = read_sizes(_config_content(source), f"config.json of {source}")
    words, processor = _file(source, "tokenizer.json"), _file(source, "preprocessor_config.json")
    tokenizer = None if words is None else read_tokenizer(words, sizes)
    normalization = None if processor is None else read_normalization(processor)
    model = load_weights(sizes, config, partial(_file, source), source=source, dtype=dtype, device=device)
    return _loaded(source, model, tokenizer, normalization)


def _loaded(source: str, model: Any, tokenizer: Any, normalization: ImageNormalization | None) -> LoadedModel:
    adapter, drop_order = adapter_for(model), _drop_order(source)
    loaded = LoadedModel(
        name=source,
        model=model,
        adapter=adapter,
        options=default_options(adapter, drop_order),
        drop_order_is_measured=drop_order is not None,
        tokenizer=tokenizer,
        normalization=normalization,
    )
    check_model(loaded)
    return loaded


def read_config(source: str) -> Any:
    """The model's configuration, without its weights."""
    content = _config_content(source)
    if is_molmo(content):
        return MolmoeConfig.of_sizes(read_sizes(content, f"config.json of {source}"))
    return _load(source, lambda: transformers.AutoConfig.from_pretrained(source, trust_remote_code=False))


def _config_content(source: str) -> dict[str, Any]:
    file = _file(source, "config.json")
    return {} if file is None else read_json(file, follow_links=True)


def load_text_model(source: str) -> Any:
    """A language model without a vision tower, in the dtype it was saved in."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = _load(source, lambda: load(source, dtype="auto", use_safetensors=True, trust_remote_code=False))
    return move_module(model.eval(), default_device())


def _source(name: str | Path) -> str:
    embedded = ", ".join(EMBEDDED_MODELS)
    return resolve_model(
        name,
        no_folder=f"There is no folder {name}. Name a folder with a model, a name on the hub, or one of the embedded"
        f" models: {embedded}.",
        no_model=f"The folder {name} holds no config.json, so no model: name one made by save_pretrained().",
    )


def _load(source: str, load: Callable[[], _Result]) -> _Result:
    embedded = ", ".join(EMBEDDED_MODELS)
    return load_from_hub(
        source, load, called=f"The model {source!r}", remedy=f"; embedded models need no download: {embedded}"
    )


def _weights(source: str, family: str, dtype: torch.dtype | str) -> Any:
    load = getattr(transformers, family).from_pretrained
    model, info = _load(source, lambda: load(source, dtype=dtype, output_loading_info=True, use_safetensors=True))
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"The model {source!r} lacks {len(missing)} of its weights, {missing[0]} among them: they would be random."
            " Fetch all files of the model again."
        )
    return model


def _file(source: str, *names: str) -> Path | None:
    """The first of these files that the model has; None if it has none of them."""
    for name in names:
        path = _load(
            source,
            lambda name=name: cached_file(  # type: ignore[misc]
                source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
            ),
        )
        if path is not None:
            return Path(path)
    return None


def _drop_order(source: str) -> Sequence[int] | None:
    file = _file(source, _IMPORTANCE_FILE)
    if file is None:
        return None
    order = read_json(file, follow_links=True).get("drop_order")
    if not isinstance(order, list) or not all(isinstance(block, int) for block in order):
        raise UserError(f"{file} holds no drop_order: it must be a list of blocks, the least important first.")
    return order


def _tokenizer(source: str) -> Any:
    if _file(source, "tokenizer_config.json", "tokenizer.json") is None:
        return None
    tokenizer = _load(source, lambda: transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False))
    if tokenizer.chat_template is None and (file := _file(source, "chat_template.json")):
        tokenizer.chat_template = read_json(file, follow_links=True).get("chat_template")
    return tokenizer


def _normalization(source: str) -> ImageNormalization | None:
    if _file(source, "preprocessor_config.json", "processor_config.json") is None:
        return None
    processor = _load(
        source, lambda: transformers.AutoImageProcessor.from_pretrained(source, backend="pil", trust_remote_code=False)
    )
    return ImageNormalization(tuple(processor.image_mean), tuple(processor.image_std))
