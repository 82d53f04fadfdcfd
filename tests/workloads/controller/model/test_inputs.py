"""Images and texts as transformers' own processors make them; bad ones are refused with the reason."""

import os
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps
from tiny.llava import IMAGE_MEAN, IMAGE_STD, SIDE, save_llava, tokenizer
from tiny.qwen_vl import patches_of, qwen_processor, save_qwen
from torch.testing import assert_close
from transformers import SiglipImageProcessor

from groupwise.core.errors import UserError
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor
from groupwise.workloads.controller.model.images import (
    ImageNormalization,
    best_grid,
    crop_by_tier,
    largest_grid,
    open_image,
    read_image,
    resized_shape,
)
from groupwise.workloads.controller.model.load import load_model

NEUTRAL = ImageNormalization((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


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


def image_of(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def assert_same_shades(given, expected, std):
    """To one of 255 shades, and seldom by that much: PIL and torch round their bicubic weights differently."""
    difference = (given - expected).abs() * 255 * min(std)
    assert difference.max() < 1.01
    assert (difference > 1e-2).double().mean() < 0.02


@pytest.mark.parametrize(("width", "height"), [(120, 90), (64, 200), (133, 101)])
def test_qwen_images_are_what_the_real_processor_makes(qwen, width, height):
    seen = qwen.front_end.sample(image_of(width, height), "what is this")
    for tier, pixels in qwen.options.pixels.items():
        real = qwen_processor(pixels)(image_of(width, height), return_tensors="pt")
        patches, grid = patches_of(seen.crops_by_tier[tier][0])
        assert grid.tolist() == real["image_grid_thw"].tolist()
        assert_same_shades(patches, real["pixel_values"], qwen.normalization.std)
        assert_close(qwen.adapter._patches(seen.crops_by_tier[tier][0]), patches)


def test_a_tier_is_filled_and_never_exceeded():
    # 100 x 50 to 5000 pixels in multiples of 8: 100/8 = 12.5 and 50/8 = 6.25 are floored
    assert resized_shape(5000, 50, 100, 8) == (48, 96)
    assert resized_shape(20_000, 50, 100, 8) == (96, 200)
    assert resized_shape(64, 8, 80, 8) == (8, 24)


def test_llava_crops_are_an_overview_and_a_grid():
    # An image of 3 x 4 cells, each of one shade: at 12 crops each crop is one cell.
    cells = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
    image = Image.fromarray(np.repeat(np.repeat(cells, 16, axis=0), 16, axis=1)).convert("RGB")
    counts = {"low": 3, "medium": 6, "high": 12}
    tiers = crop_by_tier(open_image(image), counts, side=8, patch=4, normalization=NEUTRAL)
    assert [len(crops) for crops in tiers.values()] == [4, 7, 13]
    shades = (torch.arange(12) * 20 / 255 - 0.5) / 0.5
    assert_close(tiers["high"][1:], shades[:, None, None, None].expand(12, 3, 8, 8))
    for crops in tiers.values():
        assert_close(crops[0], tiers["low"][0])
    assert [best_grid(count, 300, 400) for count in (3, 6, 12)] == [(1, 3), (2, 3), (3, 4)]
    assert best_grid(12, 900, 300) == (6, 2)


def test_the_overview_is_what_the_real_processor_makes(llava):
    seen = llava.front_end.sample(image_of(50, 40), "what is this")
    processor = SiglipImageProcessor(
        size={"height": SIDE, "width": SIDE}, image_mean=IMAGE_MEAN, image_std=IMAGE_STD, resample=3
    )
    real = processor(image_of(50, 40), return_tensors="pt")["pixel_values"]
    assert_same_shades(seen.crops_by_tier["high"][:1], real, IMAGE_STD)


def test_only_the_tier_that_is_read_is_cut_and_lengths_are_known_before(llava, qwen):
    for loaded in (llava, qwen):
        crops = loaded.front_end.sample(image_of(133, 101), "what is this").crops_by_tier
        lengths = {tier: loaded.adapter.image_tokens(shape) for tier, shape in crops.shapes.items()}
        assert crops.cut_ms == 0
        high = crops["high"]
        spent = crops.cut_ms
        assert spent > 0
        assert tuple(high.shape) == crops.shapes["high"]
        assert lengths["high"] == loaded.adapter.image_tokens(high.shape)
        assert torch.equal(high, loaded.front_end.sample(image_of(133, 101), "what").crops_by_tier["high"])
        assert crops["high"] is high
        assert crops.cut_ms < 2 * spent + 1


def test_cells_of_unequal_size_are_cut_like_each_alone():
    # 70 columns in 3 cells: 23, 24 and 23 wide
    image = image_of(70, 31)
    crops = crop_by_tier(open_image(image), {"low": 3}, side=8, patch=4, normalization=NEUTRAL)["low"]
    bounds = [(0, 23), (23, 47), (47, 70)]
    for crop, (left, right) in zip(crops[1:], bounds, strict=True):
        alone = image.crop((left, 0, right, 31)).resize((8, 8), Image.Resampling.BICUBIC)
        shades = torch.from_numpy(np.array(alone)).permute(2, 0, 1)
        assert_same_shades(crop, (shades / 255 - 0.5) / 0.5, NEUTRAL.std)


@pytest.mark.parametrize("file", ["large.jpg", "large.png", "turned.jpg"])
def test_a_much_larger_image_is_shrunk_when_it_is_opened(file, tmp_path):
    """To at least twice what the finest tier shows; what it shows hardly changes, and its grid and sides not at all."""
    smooth = image_of(30, 20).resize((1200, 900), Image.Resampling.BICUBIC)
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6  # shown by a quarter of a turn to the right
    smooth.save(tmp_path / file, quality=95, **({"exif": turned} if file == "turned.jpg" else {}))
    whole = open_image(tmp_path / file)
    shrunk = open_image(tmp_path / file, lambda sides: largest_grid(sides, [3, 12], side=24))
    assert whole.sides == shrunk.sides == ((1200, 900) if file == "turned.jpg" else (900, 1200))
    assert tuple(whole.pixels.shape[:2]) == whole.sides
    rows, columns, _ = shrunk.pixels.shape
    needed = largest_grid(whole.sides, [3, 12], side=24)
    assert 2 * needed[0] <= rows < 5 * needed[0]
    assert 2 * needed[1] <= columns < 5 * needed[1]
    exact, near = (
        crop_by_tier(image, {"low": 3, "high": 12}, side=24, patch=4, normalization=NEUTRAL)["high"]
        for image in (whole, shrunk)
    )
    assert ((exact - near).abs() * 255 / 2).mean() < 2.5


@pytest.mark.parametrize("family", ["llava", "qwen"])
def test_a_question_about_an_image_is_answered(family, tmp_path, request):
    loaded = request.getfixturevalue(family)
    image_of(70, 50).save(tmp_path / "seen.png")
    asked = loaded.front_end.sample(tmp_path / "seen.png", "what is this")
    assert (asked.prefix_ids, asked.question_ids) == ((1,), (3, 4, 5, 2))  # user <image> what is this assistant
    assert asked.name == loaded.front_end.sample(image_of(70, 50), "what is this").name
    assert asked.name != loaded.front_end.sample(image_of(70, 50), "where is this").name
    _, work = Executor(loaded.adapter, loaded.options).answer([AnswerRequest(asked, loaded.options.full)])
    tokens = 5 + loaded.adapter.image_tokens(asked.crops_by_tier["high"].shape)
    experts = loaded.options.total_blocks - len(loaded.options.dense_blocks)
    assert work.expert_pairs == 4 * ((experts - 1) * tokens + 1)  # in the last block only the last token


def test_an_image_is_the_same_in_all_forms(llava, tmp_path):
    picture = image_of(70, 50)
    picture.save(tmp_path / "seen.png")
    content, pixels = (tmp_path / "seen.png").read_bytes(), np.asarray(picture)
    opaque = np.dstack([pixels, np.full(pixels.shape[:2], 255, np.uint8)])
    given = [tmp_path / "seen.png", str(tmp_path / "seen.png"), content, BytesIO(content), picture, pixels, opaque]
    given += [pixels / 255, torch.from_numpy(pixels.copy()), torch.from_numpy(pixels / 255)]
    assert len({llava.front_end.sample(each, "what").name for each in given}) == 1
    gray = np.asarray(picture.convert("L"))
    grays = [gray, gray[:, :, None], Image.fromarray(gray), Image.fromarray(gray).convert("RGB")]
    assert len({llava.front_end.sample(each, "what").name for each in grays}) == 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["file", "bytes", "image"])
def test_the_orientation_is_respected_unless_it_is_to_be_ignored(orientation, form, tmp_path):
    stored = image_of(30, 20)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    stored.save(tmp_path / "turned.png", exif=exif)
    file = tmp_path / "turned.png"
    given = {"file": file, "bytes": file.read_bytes(), "image": Image.open(file)}[form]
    upright = ImageOps.exif_transpose(Image.open(file))
    respected, ignored = open_image(given), open_image(given, exif_orientation=False)
    assert respected.sides == upright.size[::-1]
    assert_close(respected.pixels, torch.from_numpy(np.array(upright)))
    assert ignored.sides == (20, 30)
    assert_close(ignored.pixels, torch.from_numpy(np.array(stored)))


def test_a_decompression_bomb_is_refused(llava, tmp_path, monkeypatch):
    image_of(64, 64).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # 4096 pixels are more than twice as many
    for given in (tmp_path / "bomb.png", (tmp_path / "bomb.png").read_bytes()):
        with pytest.raises(UserError, match=r"is refused: Image size \(4096 pixels\) exceeds limit.*MAX_IMAGE_PIXELS"):
            llava.front_end.sample(given, "what")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (None, "The image is None: give one image, as a path"),
        ([1, 2], "The image is of type list"),
        (np.zeros((3, 40, 40), np.uint8), r"of shape \(3, 40, 40\): it must be height x width.*transpose\(1, 2, 0\)"),
        (np.zeros((0, 40, 3), np.uint8), r"of shape \(0, 40, 3\)"),
        (np.full((40, 40, 3), 255.0), "array of float64 with values from 255 to 255: floats must be from 0 to 1"),
        (np.full((40, 40, 3), 7), "array of int64 with values from 7 to 7"),
        (torch.full((40, 40), float("nan")), "with values from nan to nan"),
        (Image.new("RGB", (0, 0)), "The image has 0 x 0 pixels"),
    ],
)
def test_what_is_no_image_is_refused_with_one_clear_error(llava, wrong, message):
    with pytest.raises(UserError, match=message):
        llava.front_end.sample(wrong, "what")


def test_bad_images_are_refused(llava, qwen, tmp_path):
    with pytest.raises(UserError, match=r"There is no image file .*nowhere.png"):
        llava.front_end.sample(tmp_path / "nowhere.png", "what")
    image_of(64, 64).save(tmp_path / "whole.png")
    whole = (tmp_path / "whole.png").read_bytes()
    for name, content in {"words.png": b"no picture", "cut.png": whole[: len(whole) // 2], "empty.png": b""}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name} cannot be read as an image"):
            llava.front_end.sample(tmp_path / name, "what")
    with pytest.raises(UserError, match=r"12 x 11 pixels is too small for 12 crops at tier 'high'.* need 16 x 12"):
        llava.front_end.sample(image_of(12, 11), "what")
    with pytest.raises(UserError, match=r"70 x 7 pixels is too small: each side needs at least 8"):
        qwen.front_end.sample(image_of(70, 7), "what")


def test_bad_questions_are_refused(llava, qwen):
    for empty in ("", "  \n", "<image>"):
        with pytest.raises(UserError, match="The question is empty"):
            llava.front_end.sample(image_of(64, 64), empty)
    # 13 crops of 4 tokens, 128 positions, 2 words of template: 74 more fit, 75 do not.
    llava.front_end.sample(image_of(64, 64), "what " * 74)
    with pytest.raises(UserError, match=r"has 77 tokens, and at tier 'high' the image has 52: together at most 128"):
        llava.front_end.sample(image_of(64, 64), "what " * 75)
    with pytest.raises(UserError, match="Shorten the question to 192 tokens"):
        qwen.front_end.sample(image_of(64, 64), "what " * 300)


def test_the_image_token_must_be_there_once(llava):
    with pytest.raises(UserError, match="contains the image token '<image>', which the chat template adds"):
        llava.front_end.sample(image_of(64, 64), "what is <image>")
    plain = replace(llava, tokenizer=tokenizer(template=None))
    asked = plain.front_end.sample(image_of(64, 64), "user <image> what assistant")
    assert (asked.prefix_ids, asked.question_ids) == ((1,), (3, 2))
    with pytest.raises(UserError, match=r"contains the image token '<image>' 0 times.*no chat template"):
        plain.front_end.sample(image_of(64, 64), "what is this")
    with pytest.raises(UserError, match="Nothing follows the image token '<image>'"):
        plain.front_end.sample(image_of(64, 64), "user what <image>")
    for_text = replace(llava, tokenizer=tokenizer(template="user {{ messages[0].content[1].text }}"))
    with pytest.raises(UserError, match="adds no image token '<image>' to the prompt"):
        for_text.front_end.sample(image_of(64, 64), "what is this")
    with pytest.raises(UserError, match="came without a tokenizer"):
        replace(llava, tokenizer=None).front_end.sample(image_of(64, 64), "what")


def test_an_image_that_pillow_gives_to_another_program_is_refused(tmp_path, monkeypatch):
    """Pillow runs Ghostscript on EPS files."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "image.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")
    with pytest.raises(UserError, match="cannot be read as an image"):
        read_image(tmp_path / "image.png")
    assert not (tmp_path / "ran").exists()
