"""From a picture and a question in words to a sample.
Pictures for the vision towers: opened with care, cut into crops or resized, and normalized.
A picture and a question in words, as users have them, for any model that can be loaded by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.groups import content_hash
from groupwise.workloads.controller.model.adapters import Sample
from groupwise.workloads.controller.model.images import ImageNormalization, open_image, read_image
from groupwise.workloads.controller.model.load import EMBEDDED, LoadedModel
from groupwise.workloads.controller.task import Question


def sample_from(image: Path | str | Image.Image, question: str, loaded: LoadedModel) -> Sample:
    """A question about a picture, ready for every tier of this model.

    The question goes through the tokenizer's chat template; for a tokenizer without one it is the whole prompt, and
    says with the image token where the image stands.
    """
    statistics = check_processors(loaded)
    before, after = prompt_token_ids(question, loaded)
    crops = loaded.adapter.cut(open_image(image), loaded.options, statistics)
    check_length(len(before) + len(after), crops, loaded)
    parts: list[str | bytes] = [repr((before, after))]
    for tier, pixels in crops.items():
        parts += [f"{tier}{tuple(pixels.shape)}", pixels.contiguous().numpy().tobytes()]
    return Sample(content_hash(*parts), crops, after, before)


def check_processors(loaded: LoadedModel) -> ImageNormalization:
    """Refuse a model that came without what turns words and pictures into its input."""
    if loaded.tokenizer is None or loaded.statistics is None:
        missing = "tokenizer" if loaded.tokenizer is None else "image processor"
        raise UserError(
            f"The model {loaded.name!r} came without a {missing}, so words and pictures cannot be turned into its"
            f" input. Save the {missing} in its folder; for mosaic, use mosaic_sample()."
        )
    return loaded.statistics


def prompt_token_ids(question: str, loaded: LoadedModel) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids before and after the image."""
    tokenizer, image_id = loaded.tokenizer, loaded.model.config.image_token_id
    image_word = tokenizer.convert_ids_to_tokens(image_id)
    if not question.replace(image_word, "").strip():
        raise UserError("The question is empty. Ask something about the image.")
    text = question
    if tokenizer.chat_template is not None:
        content = [{"type": "image"}, {"type": "text", "text": question}]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
    begun = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    ids = tuple(tokenizer(text, add_special_tokens=not begun)["input_ids"])
    if ids.count(image_id) != 1:
        raise UserError(
            _image_token_error(image_word, ids.count(image_id), templated=tokenizer.chat_template is not None)
        )
    place = ids.index(image_id)
    if place + 1 == len(ids):
        raise UserError(f"Nothing follows the image token {image_word!r} in the prompt. Ask after it, as models do.")
    return ids[:place], ids[place + 1 :]


def _image_token_error(image_word: str, count: int, *, templated: bool) -> str:
    if not templated:
        return (
            f"The prompt holds the image token {image_word!r} {count} times: it must stand once, where the image"
            f" belongs, since this model's tokenizer has no chat template. Write for example"
            f" 'USER: {image_word} What is this? ASSISTANT:'."
        )
    if count:
        return (
            f"The question holds the image token {image_word!r}, which the chat template already puts in. Leave it out."
        )
    return (
        f"The chat template of this model puts no image token {image_word!r} into the prompt: it is made for text"
        " alone. Store a template for images with the tokenizer."
    )


def check_length(words: int, crops: Mapping[str, Tensor], loaded: LoadedModel) -> None:
    """Refuse a prompt that is longer than the model's context at some tier."""
    most = loaded.adapter.text_config.max_position_embeddings
    tokens, tier = max((loaded.adapter.image_tokens(pixels), tier) for tier, pixels in crops.items())
    if words + tokens > most:
        raise UserError(
            f"The question with its template has {words} tokens, and at tier {tier!r} the image has {tokens}: together"
            f" at most {most} are allowed. Shorten the question to {max(0, most - tokens)} tokens, or offer coarser"
            " tiers."
        )


ImageInput = Path | str | Image.Image | Tensor | np.ndarray[Any, Any]
"""A file or a picture; for mosaic also its pixels, height x width."""
QUESTION = "{question}"


def make_question(image: ImageInput, text: str, loaded: LoadedModel, *, prompt: str = QUESTION) -> Question:
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
        from groupwise.workloads.controller.tasks.mosaic import questions as words

        return lambda tokens: words.decode(list(tokens))
    return lambda tokens: loaded.tokenizer.decode(list(tokens), skip_special_tokens=True).strip()


def stop_token_id(loaded: LoadedModel) -> int | None:
    """The token that ends an answer; None for a model that has none."""
    known = [getattr(holder, "eos_token_id", None) for holder in (loaded.tokenizer, loaded.adapter.text_config)]
    ends = [token for token in known if isinstance(token, int)]
    return ends[0] if ends else None


def _sample(image: ImageInput, text: str, loaded: LoadedModel) -> Sample:
    if loaded.name == EMBEDDED:
        from groupwise.workloads.controller.tasks.mosaic import questions as words
        from groupwise.workloads.controller.tasks.mosaic.task import mosaic_sample

        sample = mosaic_sample(_brightness(image), words.encode(text))
        check_length(len(sample.question), sample.crops, loaded)
        return sample
    if isinstance(image, Tensor | np.ndarray):
        raise UserError(
            f"The image is an array of shape {tuple(image.shape)}: {loaded.name!r} takes a file or a PIL picture, which"
            " it cuts and normalizes itself. Make one with PIL.Image.fromarray."
        )
    return sample_from(image, text, loaded)


def _brightness(image: ImageInput) -> Float[Tensor, "height width"]:
    """From 0 for black to 1 for white, as mosaics are drawn."""
    if _is_path(image):
        image = read_image(Path(str(image)))
    if isinstance(image, Image.Image):
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


def _is_path(image: ImageInput) -> bool:
    return isinstance(image, Path | str)
