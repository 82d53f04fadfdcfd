"""FrontEnd: an image and a text into a sample, tokens into text; and the default one, for transformers models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import isqrt
from typing import TYPE_CHECKING, Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.groups import content_hash
from groupwise.workloads.controller.model.adapters import ModelAdapter, Sample, image_side
from groupwise.workloads.controller.model.images import (
    ImageInput,
    ImageNormalization,
    LazyCrops,
    SourceImage,
    crop_shapes,
    open_image,
)

if TYPE_CHECKING:
    from groupwise.workloads.controller.model.load import LoadedModel


class FrontEnd(Protocol):
    """Inputs and outputs of one model as users have them. Every loaded model has one."""

    def sample(self, image: ImageInput, text: str) -> Sample:
        """A question about an image, ready for every tier of the model."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of an answer's tokens."""
        ...

    def probe_samples(self, question_tokens: Sequence[int]) -> list[Sample]:
        """Samples for timing, with questions of about these lengths. They are the same on every call."""
        ...


class TransformersFrontEnd:
    """Tokenizer, chat template and image normalization as they were saved with a transformers model."""

    def __init__(self, loaded: LoadedModel):
        self._loaded = loaded

    def sample(self, image: ImageInput, text: str) -> Sample:
        """The text goes through the tokenizer's chat template. For a tokenizer without one it is the whole prompt, in
        which the image token says where the image is.
        """
        loaded = self._loaded
        normalization = check_processors(loaded)
        prefix_ids, question_ids = prompt_token_ids(text, loaded)
        source = open_for(loaded, image)
        crops = loaded.adapter.crop(source, loaded.options, normalization)
        check_length(len(prefix_ids) + len(question_ids), crops, loaded)
        content = repr((prefix_ids, question_ids, crops.shapes, source.sides, tuple(source.pixels.shape)))
        return Sample(content_hash(content, source.pixels.numpy().data), crops, question_ids, prefix_ids)

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._loaded.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text.strip()

    def probe_samples(self, question_tokens: Sequence[int]) -> list[Sample]:
        """Random pixels and tokens: the latency of an answer does not depend on their content."""
        loaded, model = self._loaded, self._loaded.model
        generator, vocabulary = torch.Generator().manual_seed(0), loaded.adapter.text_config.vocab_size
        neutral = ImageNormalization((0.5,) * 3, (0.5,) * 3)
        channels = getattr(model.config.vision_config, "num_channels", 3)
        images = [
            _ready(loaded.adapter.crop(open_image(noise), loaded.options, neutral), channels, model)
            for noise in noise_images(loaded, len(question_tokens))
        ]
        questions = [torch.randint(vocabulary, (length,), generator=generator) for length in question_tokens]
        return [
            Sample(f"noise {index}", images[index % len(images)], tuple(ids.tolist()))
            for index, ids in enumerate(questions)
        ]


def _ready(crops: LazyCrops, channels: int, model: Any) -> LazyCrops:
    """Cut already, and where the model is: timing starts behind it."""
    cut = {tier: pixels[:, :channels].to(model.device, model.dtype) for tier, pixels in crops.items()}
    return LazyCrops(crops.shapes, cut.__getitem__)


def noise_images(loaded: LoadedModel, most: int = 1) -> list[Image.Image]:
    """As large as the finest tier can use; of several shapes where the number of crops depends on the shape."""
    vision, pixels = loaded.model.config.vision_config, loaded.options.pixels
    side = max([image_side(vision) * 4, *(isqrt(count) for count in pixels.values())])
    generator = torch.Generator().manual_seed(0)
    parts = loaded.adapter.probe_shapes[:most]
    shapes = [(round(side * height), round(side * width)) for height, width in parts]
    noise = [torch.randint(256, (*shape, 3), generator=generator, dtype=torch.uint8) for shape in shapes]
    return [Image.fromarray(image.numpy()) for image in noise]


def open_for(loaded: LoadedModel, image: ImageInput) -> SourceImage:
    """An image with no more pixels than the finest tier of a model can use."""
    finest = partial(loaded.adapter.finest_sides, options=loaded.options)
    return open_image(image, finest, exif_orientation=loaded.exif_orientation)


def check_processors(loaded: LoadedModel) -> ImageNormalization:
    """The normalization of a model's images; refuse a model that came without it or without a tokenizer."""
    if loaded.tokenizer is None or loaded.normalization is None:
        missing = "tokenizer" if loaded.tokenizer is None else "image processor"
        raise UserError(
            f"The model {loaded.name!r} came without a {missing}, so texts and images cannot be turned into its input."
            f" Save the {missing} in its folder."
        )
    return loaded.normalization


def prompt_token_ids(text: str, loaded: LoadedModel) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids before and after the image."""
    tokenizer, image_id = loaded.tokenizer, loaded.model.config.image_token_id
    image_token = tokenizer.convert_ids_to_tokens(image_id)
    if image_token is None:
        raise _foreign_tokenizer_error(loaded, f"it has no token {image_id}, which stands for the image")
    if not text.replace(image_token, "").strip():
        raise UserError("The question is empty. Ask something about the image.")
    has_template, prompt = tokenizer.chat_template is not None, text
    if has_template:
        content = [{"type": "image"}, {"type": "text", "text": text}]
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
    has_bos = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
    ids = tuple(tokenizer(prompt, add_special_tokens=not has_bos)["input_ids"])
    words = loaded.adapter.text_config.vocab_size
    if max(ids) >= words:
        raise _foreign_tokenizer_error(loaded, f"it gives the token {max(ids)}, and the model knows {words} tokens")
    if ids.count(image_id) != 1:
        raise UserError(_image_token_error(image_token, ids.count(image_id), has_template=has_template))
    index = ids.index(image_id)
    if index + 1 == len(ids):
        raise UserError(f"Nothing follows the image token {image_token!r} in the prompt. Put the question after it.")
    before, after = loaded.adapter.image_delimiters(tokenizer)
    return ids[:index] + before, after + ids[index + 1 :]


def _foreign_tokenizer_error(loaded: LoadedModel, reason: str) -> UserError:
    return UserError(
        f"The tokenizer of {loaded.name!r} is one of another model: {reason}. Put the model's own tokenizer into its"
        " folder."
    )


def _image_token_error(image_token: str, count: int, *, has_template: bool) -> str:
    if not has_template:
        return (
            f"The prompt contains the image token {image_token!r} {count} times: it must be there once, where the image"
            " belongs, since this model's tokenizer has no chat template. Write for example"
            f" 'USER: {image_token} What is this? ASSISTANT:'."
        )
    if count:
        return f"The question contains the image token {image_token!r}, which the chat template adds. Leave it out."
    return (
        f"The chat template of this model adds no image token {image_token!r} to the prompt: it is made for text"
        " alone. Store a template for images with the tokenizer."
    )


def check_length(text_tokens: int, crops: Mapping[str, Tensor], loaded: LoadedModel) -> None:
    """Refuse a prompt that is longer than the model's context at some tier."""
    longest = loaded.adapter.text_config.max_position_embeddings
    tokens = {tier: loaded.adapter.image_tokens(shape) for tier, shape in crop_shapes(crops).items()}
    image_tokens, tier = max((count, tier) for tier, count in tokens.items())
    if text_tokens + image_tokens > longest:
        raise UserError(
            f"The question with its template has {text_tokens} tokens, and at tier {tier!r} the image has"
            f" {image_tokens}: together at most {longest} are allowed. Shorten the question to"
            f" {max(0, longest - image_tokens)} tokens, or offer coarser tiers."
        )


def prompt_length(adapter: ModelAdapter, sample: Sample, tier: str) -> int:
    """Tokens of the prompt at one tier, image tokens included. No tier is cut for it."""
    image_tokens = adapter.image_tokens(crop_shapes(sample.crops_by_tier)[tier])
    return len(sample.prefix_ids) + image_tokens + len(sample.question_ids)


def stop_token_id(loaded: LoadedModel) -> int | None:
    """The token that ends an answer; None for a model that has none."""
    holders = (loaded.tokenizer, loaded.adapter.text_config)
    ids = [getattr(holder, "eos_token_id", None) for holder in holders]
    return next((token for token in ids if isinstance(token, int)), None)


__all__ = [
    "FrontEnd",
    "ImageInput",
    "TransformersFrontEnd",
    "check_length",
    "check_processors",
    "noise_images",
    "open_for",
    "prompt_length",
    "prompt_token_ids",
    "stop_token_id",
]
