"""Parts of a diffusers pipeline folder. Only the transformer stays on the device; the rest is moved there when used."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers.models.modeling_utils import no_init_weights
from jaxtyping import Float
from torch import Tensor, nn

from groupwise.core.errors import UserError, is_out_of_memory
from groupwise.core.groups import content_hash
from groupwise.core.io.files import read_json
from groupwise.data.file_hash import file_hash
from groupwise.dist.deferred_weights import defer_weights, defers_weights, files_in, without_weights
from groupwise.dist.devices import move_module
from groupwise.workloads.flow.models.base import NEGATIVE_PREFIX, Conditioning
from groupwise.workloads.flow.sampling.encoding_store import CachedEncoder, EncodingStore


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
    return read_json(index, follow_links=True)


def diffusers_class(folder: Path, name: object, base: type) -> Any:
    """A class of diffusers that a pipeline folder names; one that is no subclass of `base` is refused."""
    found = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not isinstance(found, type) or not issubclass(found, base):
        raise UserError(f"{folder} names {str(name)[:80]!r}, which is no {base.__name__} of diffusers. Restore it.")
    return found


def load_transformer(
    model_class: Any, folder: Path, dtype: str, device: torch.device, name: str = "transformer"
) -> Any:
    """The transformer of a pipeline folder, on the device, in eval mode; deferred where weights are."""
    torch_dtype = getattr(torch, dtype)
    with _damage_explained(folder / name):
        deferred = _load_without_weights(model_class, folder / name, torch_dtype) if defers_weights() else None
        if deferred is not None:
            return deferred.eval()
        transformer = model_class.from_pretrained(folder, subfolder=name, dtype=torch_dtype, use_safetensors=True)
    return move_module(transformer, device).eval()


@contextmanager
def _damage_explained(folder: Path) -> Iterator[None]:
    """What diffusers raises about files that it has not written, which may be anything, in a sentence."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{folder} cannot be loaded ({type(error).__name__}: {reason}). Download or save the pipeline again."
        ) from error


def _load_without_weights(model_class: Any, folder: Path, dtype: torch.dtype) -> Any:
    """The transformer with its weights still in the folder's files; None where those are not all, by their names."""
    files = files_in(folder, "diffusion_pytorch_model")
    if files is None:
        return None
    with without_weights(), no_init_weights():
        transformer = model_class.from_config(model_class.load_config(folder))
    kept_in_float32 = {*(transformer._keep_in_fp32_modules or ())} if dtype.itemsize < 4 else set()
    for name, weight in transformer.named_parameters():
        weight.data = weight.data.to(torch.float32 if kept_in_float32 & {*name.split(".")} else dtype)
    return transformer if defer_weights(transformer, files) else None


def load_pipeline_without_transformer(
    pipeline_class: Any, folder: Path, dtype: str, names: Sequence[str] = ("transformer",)
) -> Any:
    """Text encoders and VAE of a pipeline folder, frozen, on the CPU."""
    without: dict[str, Any] = dict.fromkeys(names)
    with _damage_explained(folder):
        pipeline = pipeline_class.from_pretrained(folder, dtype=getattr(torch, dtype), use_safetensors=True, **without)
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(False).eval()
    return pipeline


def encoder_hash(folder: Path, parts: Sequence[str], *settings: object) -> str:
    """A name for what some parts of a pipeline folder compute: their files, these settings, the libraries' versions."""
    files = sorted(file for part in parts for file in (folder / part).rglob("*") if file.is_file())
    content = [f"{file.relative_to(folder)}:{file_hash(file)};" for file in files]
    versions = (torch.__version__, transformers.__version__, diffusers.__version__)
    return content_hash(*content, repr((versions, settings)))


class TextEncoder:
    """A pipeline's prompts, encoded; the negative prompt once for all of them."""

    def __init__(self, store: EncodingStore | None, folder: Path, pipeline: Any):
        parts = sorted(name for name in pipeline.components if name.startswith(("text_encoder", "tokenizer")))
        dtypes = [getattr(pipeline.components[name], "dtype", None) for name in parts]
        settings = (type(pipeline).__name__, text_length(pipeline), dtypes)
        self._cached = CachedEncoder(store, lambda: encoder_hash(folder, parts, *settings))
        self._negative: Conditioning | None = None

    def with_negative(
        self, prompts: list[str], encode: Callable[[list[str]], Mapping[str, Tensor]], negative_prompt: str
    ) -> list[Conditioning]:
        """The columns that `encode` makes of each prompt, and those of the negative prompt under their prefix."""
        if self._negative is None:
            (negative,) = self._cached.encode([negative_prompt], lambda _: first_row(encode([negative_prompt])))
            self._negative = {f"{NEGATIVE_PREFIX}{name}": column for name, column in negative.items()}
        texts = self._cached.encode(prompts, lambda row: first_row(encode([prompts[row]])))
        return [{**text, **self._negative} for text in texts]


def first_row(columns: Mapping[str, Tensor]) -> Conditioning:
    """Of encoded columns, on the CPU."""
    return {name: column[0].cpu() for name, column in columns.items()}


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
