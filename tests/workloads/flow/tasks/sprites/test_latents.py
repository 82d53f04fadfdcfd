"""Latents in closed form, and the pictures that the decoder paints from them."""

import torch
from torch.nn import functional
from torch.testing import assert_close

from groupwise.workloads.flow.data.cameras import motion_to_pose
from groupwise.workloads.flow.tasks.sprites.config import FRAMES, LATENT_SIDE, SIDE
from groupwise.workloads.flow.tasks.sprites.latents import (
    PALETTE,
    decode,
    encode_source,
    enlarge,
    latents_of,
    source_pictures,
    true_clips,
)
from groupwise.workloads.flow.tasks.sprites.scene import draw_motions, draw_scenes

CENTERS = torch.tensor([[[0.0, 0.0], [-0.6, 0.0], [0.6, 0.0]]])
STILL = motion_to_pose(torch.zeros(1, FRAMES, 6))


def test_planes_are_enlarged_as_torch_does_it():
    planes = torch.rand(2, 5, LATENT_SIDE, LATENT_SIDE, generator=torch.Generator().manual_seed(0))
    assert_close(enlarge(planes, SIDE), functional.interpolate(planes, size=(SIDE, SIDE), mode="bicubic"))


def test_the_picture_has_each_sprite_at_its_place_in_its_color_and_light():
    for light in (1.0, 0.7, 0.45):
        frame = (true_clips(CENTERS, STILL, torch.tensor([light]))[0, :, 0] + 1) / 2
        for center, color in zip(CENTERS[0], PALETTE, strict=True):
            across, down = ((1 + center) / 2 * SIDE).int().tolist()
            assert_close(frame[:, down, across], light * color, rtol=0, atol=0.02)
        corner = frame[:, 1, 1]  # the floor: gray, 0.55 +- 0.13
        assert_close(corner, corner.mean().expand(3), rtol=0, atol=1e-3)
        assert 0.42 * light <= corner[0] <= 0.68 * light


def test_the_last_channels_say_how_far_the_points_have_moved_and_are_not_painted():
    moved = motion_to_pose(torch.tensor([0.0, 0, 0, 0.25, -0.5, 0])).expand(1, FRAMES, 12)
    latents = latents_of(CENTERS, moved, torch.ones(1))
    assert latents.shape == (1, 7, FRAMES, LATENT_SIDE, LATENT_SIDE)
    assert_close(latents[:, 5], torch.ones_like(latents[:, 5]))  # 0.25 across in units of 0.25
    assert_close(latents[:, 6], torch.full_like(latents[:, 6], -2.0))
    changed = latents.clone()
    changed[:, 5:] += 1
    assert torch.equal(decode(changed), decode(latents))


def test_latents_have_about_unit_variance():
    numbers = torch.arange(64)
    camera = motion_to_pose(draw_motions(1, numbers))
    latents = latents_of(draw_scenes(1, numbers), camera, torch.linspace(0.45, 1, 64))
    assert latents.mean((0, 2, 3, 4)).abs().max() < 0.3
    assert 0.3 < latents.std((0, 2, 3, 4)).min() <= latents.std((0, 2, 3, 4)).max() < 1.3


def test_the_source_is_a_wide_shot_that_is_encoded_as_its_colors():
    source = source_pictures(CENTERS)
    assert source.shape == (1, 3, 1, SIDE, SIDE)
    # from distance 1.5 the square at -0.6 appears at -0.4: pixel 0.6 x 24
    assert_close((source[0, :, 0, 24, 14] + 1) / 2, PALETTE[1], rtol=0, atol=0.03)
    encoded = encode_source(source)
    assert encoded.shape == (1, 7, 1, LATENT_SIDE, LATENT_SIDE)
    assert_close(encoded[0, :3, 0, 6, 6], 2 * source[0, :, 0, 24:28, 24:28].mean((-1, -2)))
    assert not encoded[:, 3:].any()
