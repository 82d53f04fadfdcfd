"""MolmoE's published tokenizer with its prompt as a chat template, and the normalization of its images."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from groupwise.core.errors import UserError
from groupwise.core.io.files import read_json
from groupwise.workloads.controller.model.images import ImageNormalization
from groupwise.workloads.controller.model.molmoe.sizes import END_OF_TEXT, IMAGE_TOKENS, MolmoeSizes

_TEMPLATE = (
    "{% for part in messages[0].content %}{% if part.type == 'image' %}"
    + END_OF_TEXT
    + IMAGE_TOKENS[-1]
    + "{% else %} User: {{ part.text }} Assistant:{% endif %}{% endfor %}"
)
"""The end of a text also begins one. The image stands right behind it; its tokens are the adapter's."""


def read_tokenizer(file: Path, sizes: MolmoeSizes) -> PreTrainedTokenizerFast:
    """tokenizer.json alone: what the other published files say of added tokens is outdated. That of another model is
    refused."""
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing more specific
        raise UserError(f"{file} cannot be read as a tokenizer ({error}). Fetch this file again.") from error
    expected = {**sizes.image_token_ids, END_OF_TEXT: sizes.vocabulary - 1}
    for token, number in expected.items():
        if (actual := tokenizer.token_to_id(token)) != number:
            raise UserError(
                f"{file} is the tokenizer of another model: {token!r} is {actual} there, and MolmoE with this"
                f" config.json has it at {number}. Take tokenizer.json from the same folder as the weights."
            )
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values())
    if largest >= sizes.head_rows:
        raise UserError(
            f"{file} is the tokenizer of another model: it has ids up to {largest}, and this model knows"
            f" {sizes.head_rows}. Take tokenizer.json from the same folder as the weights."
        )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)
    made.chat_template = _TEMPLATE
    return made


def read_normalization(file: Path) -> ImageNormalization:
    """Mean and deviation of each color, from preprocessor_config.json."""
    try:
        content = read_json(file, follow_links=True)
        mean, std = (tuple(float(value) for value in content[name]) for name in ("image_mean", "image_std"))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} has no image_mean and image_std of three numbers ({error!r}). Fix it.") from error
    if len(mean) != 3 or len(std) != 3:
        raise UserError(f"{file} has {len(mean)} numbers in image_mean and {len(std)} in image_std: both need three.")
    return ImageNormalization(mean, std)
