"""InternVL's inputs: crops and overview as its own processor orders them, between its start and end tokens."""

import numpy as np
import pytest
from PIL import Image
from tiny.families import IMAGE_TOKEN, internvl
from tiny.llava import TEMPLATE, tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from groupwise.core.errors import UserError
from groupwise.workloads.controller.model.adapters import adapter_for, default_options
from groupwise.workloads.controller.model.images import ImageNormalization
from groupwise.workloads.controller.model.load import LoadedModel
from groupwise.workloads.controller.model.self_check import compare

MEAN = STD = (0.5, 0.5, 0.5)


def own_tokenizer():
    words = [
        "<unk>",
        "user",
        "assistant",
        "what",
        "<img>",
        "</img>",
        *(f"word{number}" for number in range(57)),
        "<image>",
    ]
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    delimiters = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<image>"}
    made = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", extra_special_tokens=delimiters)
    made.chat_template = TEMPLATE
    return made


def loaded(words):
    model = internvl()
    adapter = adapter_for(model)
    return LoadedModel("tiny", model, adapter, default_options(adapter), False, words, ImageNormalization(MEAN, STD))


def test_the_prompt_and_the_crops_are_those_of_its_own_processor():
    checked = loaded(own_tokenizer())
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 48, 3), dtype=np.uint8))
    sample = checked.front_end.sample(image, "what")
    assert (sample.prefix_ids, sample.question_ids) == ((1, 4), (5, 3, 2))  # user <img> ... </img> what assistant
    given = checked.adapter._stock_inputs(sample, "low", ())
    # 4 crops of 16 x 16 pixels: 4 x 4 patches each, of which 2 x 2 become a token
    assert given["input_ids"].tolist() == [[1, 4, *[IMAGE_TOKEN] * 16, 5, 3, 2]]
    processor = GotOcr2ImageProcessorPil(
        size={"height": 16, "width": 16},
        crop_to_patches=True,
        min_patches=3,
        max_patches=3,
        image_mean=MEAN,
        image_std=STD,
    )
    real = processor(image, return_tensors="pt")["pixel_values"]
    assert_close(given["pixel_values"][:3], real[:3])
    assert (given["pixel_values"][3] - real[3]).abs().max() * 255 / 2 < 1.01  # resized: PIL and torch round differently
    assert max(compare(checked).values()) < 1e-5


def test_a_tokenizer_without_delimiters_is_refused():
    plain = tokenizer()
    checked = loaded(plain)
    checked.model.config.image_token_id = 39
    image = Image.new("RGB", (48, 48))
    with pytest.raises(UserError, match="has no start_image_token, which belongs beside the image"):
        checked.front_end.sample(image, "what")
