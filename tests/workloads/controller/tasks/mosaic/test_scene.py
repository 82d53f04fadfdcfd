"""Handwriting is disjoint by image, tiles keep their content, and crops have the right number, size and resolution."""

from itertools import combinations

import numpy as np
import pytest
import torch

from groupwise.workloads.controller.tasks.mosaic.scene import (
    CROPS,
    EMPTY,
    FAMILY_SHARES,
    PLAIN_JITTER,
    PRINTS,
    HandwritingSplit,
    Jitter,
    Mosaics,
    Print,
    Tier,
    coverage,
    cut,
    draw_mosaics,
    image_tokens,
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


def draw_family(style: Print, *, framed: bool, count: int = 40) -> Mosaics:
    bank = load_handwriting(HandwritingSplit.TEST)
    return draw_mosaics(bank, count, PLAIN_JITTER, np.random.default_rng(1), {(style, framed): 1.0})


def ink_in_crops(style: Print, tier: Tier) -> float:
    """How much brighter or darker than their paper the crops are where there is ink, beyond their noise."""
    crops = cut(draw_family(style, framed=False).pixels, tier)[:, 1:, 0]
    noise = 0.08 / 0.35 / (12 / CROPS[tier]) ** 0.5
    return float((crops - crops.median()).square().mean()) ** 0.5 / noise


@pytest.mark.parametrize(
    ("style", "readable"), [(Print.BOLD, {*Tier}), (Print.COARSE, {Tier.MEDIUM, Tier.HIGH}), (Print.FINE, {Tier.HIGH})]
)
def test_a_print_vanishes_in_the_crops_that_are_too_coarse_for_it(style: Print, readable: set[Tier]):
    for tier in Tier:
        if tier in readable:
            assert ink_in_crops(style, tier) > 1.4
        else:
            assert ink_in_crops(style, tier) < 1.35


def test_the_overview_tells_the_families_apart():
    """By the brightness of its middle and of its rim."""
    for style in Print:
        for framed in (False, True):
            overview = cut(draw_family(style, framed=framed).pixels, Tier.LOW)[:, 0, 0] * 0.35 + 0.25
            paper = overview[:, 1:-1, 1:-1].flatten(1).quantile(0.1, dim=1)
            rim = overview[:, 0].quantile(0.1, dim=1)
            lower, upper = {Print.BOLD: (-1.0, 0.15), Print.COARSE: (0.15, 0.4), Print.FINE: (0.4, 1.0)}[style]
            assert ((paper > lower) & (paper < upper)).all()
            assert ((rim > paper + 0.08) == framed).all()


def test_families_are_as_frequent_as_they_shall_be():
    drawn = draw_mosaics(load_handwriting(HandwritingSplit.TEST), 4000, PLAIN_JITTER, np.random.default_rng(1))
    assert sum(FAMILY_SHARES.values()) == pytest.approx(1)
    for (style, framed), share in FAMILY_SHARES.items():
        found = (drawn.prints == PRINTS.index(style)) & (drawn.framed == framed)
        assert found.mean() == pytest.approx(share, abs=0.025)


def test_empty_tiles_are_dark_and_the_others_are_not():
    drawn = draw_family(Print.BOLD, framed=False, count=20)
    tiles = drawn.pixels.view(20, 3, 12, 4, 12).permute(0, 1, 3, 2, 4).reshape(20 * 12, -1)
    brightness = tiles.mean(1).numpy()
    is_empty = drawn.labels.reshape(-1) == EMPTY
    assert brightness[is_empty].max() < brightness[~is_empty].min()


def test_the_same_numbers_draw_the_same_mosaics():
    bank = load_handwriting(HandwritingSplit.TRAIN)
    first, second = (draw_mosaics(bank, 3, PLAIN_JITTER, np.random.default_rng([0, 5])) for _ in range(2))
    assert torch.equal(first.pixels, second.pixels)
    assert (first.labels == second.labels).all()


@pytest.mark.parametrize(("tier", "crops"), [(Tier.LOW, 3), (Tier.MEDIUM, 6), (Tier.HIGH, 12)])
def test_an_overview_and_3_6_or_12_crops(tier: Tier, crops: int):
    assert cut(torch.zeros(2, 36, 48), tier).shape == (2, 1 + crops, 3, 12, 12)
    assert image_tokens(tier) == (1 + crops) * 9


def test_the_finest_crops_are_the_tiles_themselves():
    tiles = torch.rand(1, 12, 12, 12)
    crops = cut(lay_out(tiles), Tier.HIGH)[0, 1:, 0]
    torch.testing.assert_close(crops * 0.35 + 0.25, tiles[0])


def test_fewer_crops_are_coarser():
    # Stripes of one pixel across: whole at the finest tier, averaged away where pixels are merged.
    stripes = (torch.arange(48) % 2).float().expand(1, 36, 48)
    contrast = {tier: cut(stripes, tier)[0, 1:, 0].std().item() for tier in Tier}
    assert contrast[Tier.HIGH] > 1
    assert contrast[Tier.MEDIUM] < 1e-5
    # Stripes of two pixels survive at the middle tier and vanish at the coarsest.
    stripes = (torch.arange(48) // 2 % 2).float().expand(1, 36, 48)
    assert cut(stripes, Tier.MEDIUM)[0, 1:, 0].std() > 1
    assert cut(stripes, Tier.LOW)[0, 1:, 0].std() < 1e-5


def test_each_pixel_knows_its_place():
    across, down = cut(torch.zeros(1, 36, 48), Tier.HIGH)[0, :, 1:].mean((2, 3)).T
    torch.testing.assert_close(across, torch.tensor([0.0] + [-0.75, -0.25, 0.25, 0.75] * 3))
    torch.testing.assert_close(down, torch.tensor([0.0] + [-2 / 3] * 4 + [0.0] * 4 + [2 / 3] * 4))


@pytest.mark.parametrize("tier", Tier)
def test_a_token_covers_a_whole_patch(tier: Tier):
    covered = coverage(tier)
    assert covered.shape == (image_tokens(tier), 12)
    torch.testing.assert_close(covered.sum(1), torch.ones(image_tokens(tier)))


def test_coverage_by_hand():
    # At the low tier 3 patches share 4 tiles: the first has one tile and a third of the next.
    torch.testing.assert_close(coverage(Tier.LOW)[9, :4], torch.tensor([0.75, 0.25, 0.0, 0.0]))
    torch.testing.assert_close(coverage(Tier.HIGH)[9 : 2 * 9, 0], torch.ones(9))
    # The overview's middle patch lies on the middle row, half on either middle tile.
    torch.testing.assert_close(coverage(Tier.HIGH)[4, 4:8], torch.tensor([0.0, 0.5, 0.5, 0.0]))


def test_a_picture_too_small_is_refused():
    with pytest.raises(ValueError, match="at least 36 x 48"):
        cut(torch.zeros(1, 30, 40), Tier.LOW)
