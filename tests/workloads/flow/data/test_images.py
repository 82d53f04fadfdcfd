"""Sheets and animations of generated clips."""

import torch
from PIL import Image

from groupwise.workloads.flow.data.images import draw_movie, draw_sheet
from groupwise.workloads.flow.task import Condition


def test_clips_stand_beside_their_sources(tmp_path):
    clips = torch.linspace(-1, 1, 2 * 3 * 9 * 16 * 24).view(2, 3, 9, 16, 24)
    conditions = [Condition("", source_clip=torch.ones(3, 12, 16, 24)), Condition("", torch.ones(3, 9, 16, 24))]
    draw_sheet(conditions, clips)(tmp_path / "clips.png")
    with Image.open(tmp_path / "clips.png") as sheet:
        assert sheet.size == (5 * 24, 4 * 16)
        assert sheet.getpixel((0, 0)) == (255, 255, 255)  # the source
        assert sheet.getpixel((0, 16))[0] == 0
    draw_movie(conditions, clips)(tmp_path / "clips.gif")
    with Image.open(tmp_path / "clips.gif") as movie:
        assert (movie.n_frames, movie.size) == (9, (2 * 24, 2 * 16))


def test_images_and_clips_from_an_image_stand_alone_and_large_ones_are_made_smaller(tmp_path):
    draw_sheet([Condition("")] * 2, torch.zeros(2, 3, 480, 832))(tmp_path / "images.png")
    with Image.open(tmp_path / "images.png") as sheet:
        assert sheet.size == (416, 2 * 240)
    draw_movie([Condition("", torch.zeros(3, 1, 16, 16))], torch.rand(1, 3, 5, 16, 16))(tmp_path / "clips.gif")
    with Image.open(tmp_path / "clips.gif") as movie:
        assert movie.size == (16, 16)
