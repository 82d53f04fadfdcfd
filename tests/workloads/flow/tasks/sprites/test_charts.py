"""Pictures of clips have the right size, and rings where sprites should be."""

import torch
from PIL import Image

from groupwise.workloads.flow.tasks.sprites.charts import draw_clips_gif, draw_clips_sheet, draw_sheet, requested_clips
from groupwise.workloads.flow.tasks.sprites.task import sprites_conditions

CONDITIONS = sprites_conditions(torch.arange(2))


def test_pictures_are_drawn(tmp_path):
    clips = torch.zeros(2, 3, 8, 48, 48)
    draw_clips_gif(CONDITIONS, clips)(tmp_path / "clips.gif")
    draw_clips_sheet(CONDITIONS, clips)(tmp_path / "clips.png")
    with Image.open(tmp_path / "clips.gif") as movie:
        assert movie.n_frames == 8
        assert movie.size == (84 + 2 * 98, 2 * 98)  # two conditions; asked and generated
    with Image.open(tmp_path / "clips.png") as sheet:
        assert sheet.size == (84 + 9 * 98, 2 * (2 * 98 + 6))  # a source and 8 frames


def test_a_ring_is_around_the_requested_place(tmp_path):
    draw_sheet(CONDITIONS[:1], {"black": -torch.ones(1, 3, 8, 48, 48)}, tmp_path / "clips.png")
    across, down = CONDITIONS[0].reward_columns["centroid"][0, 7].tolist()
    x, y = (round((1 + place) * 48) for place in (across, down))
    with Image.open(tmp_path / "clips.png") as sheet:
        cell = sheet.crop((84 + 8 * 98, 98, 84 + 9 * 98 - 2, 98 + 96))
        assert max(cell.getpixel((x, y))) == 0
        assert max(max(cell.getpixel((x + shift, y))) for shift in (4, 5, 6)) == 255


def test_the_requested_clips_are_the_true_ones():
    assert requested_clips(CONDITIONS).shape == (2, 3, 8, 48, 48)
