"""A picture and a question in words, as users have them, for any model that can be loaded by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.workloads.controller.adapter import Sample
from groupwise.workloads.controller.images import read_image
from groupwise.workloads.controller.loading import EMBEDDED, LoadedModel
from groupwise.workloads.controller.mosaic import words
from groupwise.workloads.controller.mosaic.steer import mosaic_sample
from groupwise.workloads.controller.samples import check_length, sample_from
from groupwise.workloads.controller.task import Question

Picture = Path | str | Image | Tensor | np.ndarray[Any, Any]
"""A file or a picture; for mosaic also its pixels, height x width."""
QUESTION = "{question}"


def question_about(image: Picture, text: str, loaded: LoadedModel, *, prompt: str = QUESTION) -> Question:
    """One thing to ask, without a known answer."""
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"The question is {text!r}: ask something about the image, in words.")
    sample = _sample(image, prompt.replace(QUESTION, text), loaded)
    return Question(sample, text, (), prompt_lengths(sample, loaded), image=str(image) if _is_path(image) else "")


def prompt_lengths(sample: Sample, loaded: LoadedModel) -> dict[str, int]:
    """Tokens of the prompt at every tier."""
    spoken = len(sample.before) + len(sample.question)
    return {tier: spoken + loaded.adapter.image_tokens(sample.crops[tier]) for tier in loaded.options.crops}


def speller(loaded: LoadedModel) -> Callable[[Sequence[int]], str]:
    """How tokens of an answer become text."""
    if loaded.name == EMBEDDED:
        return lambda tokens: words.decode(list(tokens))
    return lambda tokens: loaded.tokenizer.decode(list(tokens), skip_special_tokens=True).strip()


def stop_token_of(loaded: LoadedModel) -> int | None:
    """The token that ends an answer; None for a model that has none."""
    known = [getattr(holder, "eos_token_id", None) for holder in (loaded.tokenizer, loaded.adapter.text_config)]
    ends = [token for token in known if isinstance(token, int)]
    return ends[0] if ends else None


def _sample(image: Picture, text: str, loaded: LoadedModel) -> Sample:
    if loaded.name == EMBEDDED:
        sample = mosaic_sample(_brightness(image), words.encode(text))
        check_length(len(sample.question), sample.crops, loaded)
        return sample
    if isinstance(image, Tensor | np.ndarray):
        raise UserError(
            f"The image is an array of shape {tuple(image.shape)}: {loaded.name!r} takes a file or a PIL picture, which"
            " it cuts and normalises itself. Make one with PIL.Image.fromarray."
        )
    return sample_from(image, text, loaded)


def _brightness(image: Picture) -> Float[Tensor, "height width"]:
    """From 0 for black to 1 for white, as mosaics are drawn."""
    if _is_path(image):
        image = read_image(Path(str(image)))
    if isinstance(image, Image):
        image = np.array(image.convert("L"))
    pixels = torch.as_tensor(image).cpu()
    if pixels.ndim != 2:
        raise UserError(
            f"The mosaic is an array of shape {tuple(pixels.shape)}: give height x width, or a PIL picture."
        )
    bright = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels.float()
    if not bright.isfinite().all():
        raise UserError("The mosaic holds pixels that are no finite numbers. Brightness goes from 0 to 1.")
    return bright


def _is_path(image: Picture) -> bool:
    return isinstance(image, Path | str)
