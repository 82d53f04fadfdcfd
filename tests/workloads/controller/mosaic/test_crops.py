"""Crops: how many, how large, how coarse, and where."""

import pytest
import torch

from groupwise.workloads.controller.tasks.mosaic.scene import Tier, coverage, cut, image_tokens, lay_out


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
