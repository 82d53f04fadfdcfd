"""Pictures and words as transformers' own processors make them; bad ones are told."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close
from transformers import SiglipImageProcessor

from groupwise.core.errors import UserError
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor
from groupwise.workloads.controller.model.images import ImageNormalization, best_grid, crops_by_tier, resized_shape
from groupwise.workloads.controller.model.inputs import sample_from
from groupwise.workloads.controller.model.load import load_model
from workloads.controller import tiny, tiny_qwen
from workloads.controller.tiny_folders import SEVERAL_SHADES, qwen_processor, save_llava, save_qwen, tokenizer


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    save_llava(folder)
    return load_model(folder)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    save_qwen(folder)
    return load_model(folder)


def picture(width: int, height: int) -> Image.Image:
    shades = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(shades)


@pytest.mark.parametrize(("width", "height"), [(120, 90), (64, 200), (333, 101)])
def test_qwen_pictures_are_what_the_real_processor_makes(qwen, width, height):
    seen = sample_from(picture(width, height), "what is this", qwen)
    for tier, pixels in qwen.options.pixels.items():
        real = qwen_processor(pixels)(picture(width, height), return_tensors="pt")
        patches, grid = tiny_qwen.patches_of(seen.crops[tier][0])
        assert grid.tolist() == real["image_grid_thw"].tolist()
        assert_close(patches, real["pixel_values"], rtol=0, atol=1e-5)
        assert_close(qwen.adapter._patches(seen.crops[tier][0]), patches)


def test_a_tier_is_filled_and_never_exceeded():
    # 100 x 50 to 5000 pixels in multiples of 8: 100/8 = 12.5 and 50/8 = 6.25 are floored
    assert resized_shape(5000, 50, 100, 8) == (48, 96)
    assert resized_shape(20_000, 50, 100, 8) == (96, 200)
    assert resized_shape(64, 8, 80, 8) == (8, 24)


def test_llava_crops_are_an_overview_and_a_grid():
    # A picture of 3 x 4 cells, each of one shade: at 12 crops each crop is one cell.
    cells = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
    image = Image.fromarray(np.repeat(np.repeat(cells, 16, axis=0), 16, axis=1)).convert("RGB")
    statistics = ImageNormalization((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    tiers = crops_by_tier(image, {"low": 3, "medium": 6, "high": 12}, 8, 4, statistics)
    assert [len(crops) for crops in tiers.values()] == [4, 7, 13]
    shades = (torch.arange(12) * 20 / 255 - 0.5) / 0.5
    assert_close(tiers["high"][1:], shades[:, None, None, None].expand(12, 3, 8, 8))
    for crops in tiers.values():
        assert_close(crops[0], tiers["low"][0])
    assert [best_grid(count, 300, 400) for count in (3, 6, 12)] == [(1, 3), (2, 3), (3, 4)]
    assert best_grid(12, 900, 300) == (6, 2)


def test_the_overview_is_what_the_real_processor_makes(llava):
    seen = sample_from(picture(50, 40), "what is this", llava)
    processor = SiglipImageProcessor(
        size={"height": tiny.SIDE, "width": tiny.SIDE}, image_mean=SEVERAL_SHADES, image_std=(0.3, 0.3, 0.2), resample=3
    )
    assert_close(seen.crops["high"][:1], processor(picture(50, 40), return_tensors="pt")["pixel_values"])


@pytest.mark.parametrize("family", ["llava", "qwen"])
def test_a_picture_and_a_question_are_answered(family, tmp_path, request):
    loaded = request.getfixturevalue(family)
    picture(70, 50).save(tmp_path / "seen.png")
    asked = sample_from(tmp_path / "seen.png", "what is this", loaded)
    assert (asked.before, asked.question) == ((1,), (3, 4, 5, 2))  # user <image> what is this assistant
    assert asked.name == sample_from(picture(70, 50), "what is this", loaded).name
    assert asked.name != sample_from(picture(70, 50), "where is this", loaded).name
    _, work = Executor(loaded.adapter, loaded.options).answer([AnswerRequest(asked, loaded.options.full)])
    tokens = 5 + loaded.adapter.image_tokens(asked.crops["high"])
    experts = loaded.options.total_blocks - len(loaded.options.dense_blocks)
    assert work.expert_pairs == 4 * ((experts - 1) * tokens + 1)  # in the last block only the last token


def test_bad_pictures_are_told(llava, qwen, tmp_path):
    with pytest.raises(UserError, match=r"There is no image file .*nowhere.png"):
        sample_from(tmp_path / "nowhere.png", "what", llava)
    picture(64, 64).save(tmp_path / "whole.png")
    whole = (tmp_path / "whole.png").read_bytes()
    for name, content in {"words.png": b"no picture", "cut.png": whole[: len(whole) // 2], "empty.png": b""}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name} cannot be read as an image"):
            sample_from(tmp_path / name, "what", llava)
    with pytest.raises(
        UserError, match=r"12 x 11 pixels has not enough of them for 12 crops at tier 'high'.* need 16 x 12"
    ):
        sample_from(picture(12, 11), "what", llava)
    with pytest.raises(UserError, match=r"70 x 7 pixels has not enough of them: each side needs at least 8"):
        sample_from(picture(70, 7), "what", qwen)


def test_bad_questions_are_told(llava, qwen):
    for empty in ("", "  \n", "<image>"):
        with pytest.raises(UserError, match="The question is empty"):
            sample_from(picture(64, 64), empty, llava)
    # 13 crops of 4 tokens, 128 positions, 2 words of template: 74 more fit, 75 do not.
    sample_from(picture(64, 64), "what " * 74, llava)
    with pytest.raises(UserError, match=r"has 77 tokens, and at tier 'high' the image has 52: together at most 128"):
        sample_from(picture(64, 64), "what " * 75, llava)
    with pytest.raises(UserError, match="Shorten the question to 192 tokens"):
        sample_from(picture(64, 64), "what " * 300, qwen)


def test_the_image_token_stands_once(llava):
    with pytest.raises(UserError, match="holds the image token '<image>', which the chat template already puts in"):
        sample_from(picture(64, 64), "what is <image>", llava)
    plain = replace(llava, tokenizer=tokenizer(template=None))
    asked = sample_from(picture(64, 64), "user <image> what assistant", plain)
    assert (asked.before, asked.question) == ((1,), (3, 2))
    with pytest.raises(UserError, match=r"holds the image token '<image>' 0 times.*no chat template"):
        sample_from(picture(64, 64), "what is this", plain)
    with pytest.raises(UserError, match="Nothing follows the image token '<image>'"):
        sample_from(picture(64, 64), "user what <image>", plain)
    for_text = replace(llava, tokenizer=tokenizer(template="user {{ messages[0].content[1].text }}"))
    with pytest.raises(UserError, match="puts no image token '<image>' into the prompt"):
        sample_from(picture(64, 64), "what is this", for_text)
    with pytest.raises(UserError, match="came without a tokenizer"):
        sample_from(picture(64, 64), "what", replace(llava, tokenizer=None))
