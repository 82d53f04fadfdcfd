"""Handwriting is disjoint by image, and tiles stay what they are."""

from itertools import combinations

import numpy as np
import torch

from groupwise.workloads.controller.tasks.mosaic.scene import (
    EMPTY,
    PLAIN_JITTER,
    HandwritingSplit,
    Jitter,
    draw_mosaics,
    lay_out,
    load_handwriting,
    render_tiles,
)


def test_no_image_is_in_two_splits():
    banks = {split: load_handwriting(split) for split in HandwritingSplit}
    for first, second in combinations(banks.values(), 2):
        assert not set(first.source_rows) & set(second.source_rows)
        images = {image.numpy().tobytes() for image in first.images}
        assert not any(image.numpy().tobytes() in images for image in second.images)
    assert sum(len(bank.labels) for bank in banks.values()) == 1797


def test_every_split_has_every_digit():
    for split in HandwritingSplit:
        assert set(load_handwriting(split).labels) == set(range(10))


def test_a_digit_without_jitter_sits_in_the_middle_of_its_tile():
    tile = render_tiles(torch.ones(1, 8, 8), Jitter(shift=0.0), np.random.default_rng(0))[0]
    # 10 of 12 pixels are covered: one pixel of margin, of which the rim is interpolated.
    assert tile[:1].abs().max() < 0.5
    assert (tile[2:10, 2:10] > 0.99).all()


def test_tiles_are_laid_out_in_reading_order():
    numbered = torch.arange(12.0).view(1, 12, 1, 1).expand(1, 12, 12, 12)
    laid = lay_out(numbered.contiguous())[0]
    assert laid.shape == (36, 48)
    assert laid[0, 0] == 0
    assert laid[0, 13] == 1
    assert laid[12, 0] == 4
    assert laid[35, 47] == 11


def test_empty_tiles_are_dark_and_the_others_are_not():
    drawn = draw_mosaics(load_handwriting(HandwritingSplit.TEST), 20, PLAIN_JITTER, np.random.default_rng(1))
    tiles = drawn.pixels.view(20, 3, 12, 4, 12).permute(0, 1, 3, 2, 4).reshape(20 * 12, -1)
    brightness = tiles.mean(1).numpy()
    is_empty = drawn.labels.reshape(-1) == EMPTY
    assert brightness[is_empty].max() < brightness[~is_empty].min()


def test_the_same_numbers_draw_the_same_mosaics():
    bank = load_handwriting(HandwritingSplit.TRAIN)
    first, second = (draw_mosaics(bank, 3, PLAIN_JITTER, np.random.default_rng([0, 5])) for _ in range(2))
    assert torch.equal(first.pixels, second.pixels)
    assert (first.labels == second.labels).all()
