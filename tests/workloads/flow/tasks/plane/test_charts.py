"""Images of clips are written and have the right size."""

import torch
from PIL import Image

from groupwise.workloads.flow.cameras import motion_to_pose
from groupwise.workloads.flow.tasks.plane.charts import draw_gif, draw_grid
from groupwise.workloads.flow.tasks.plane.config import SIDE
from groupwise.workloads.flow.tasks.plane.scene import draw_motions, draw_scenes, render_clip
from groupwise.workloads.flow.tasks.plane.task import plane_conditions


def test_images_are_drawn(tmp_path):
    numbers = torch.arange(2)
    conditions = plane_conditions(numbers)
    clips = render_clip(draw_scenes(3, numbers), motion_to_pose(draw_motions(3, numbers)))
    draw_gif(conditions, clips)(tmp_path / "clips.gif")
    draw_grid(conditions, clips)(tmp_path / "clips.png")
    with Image.open(tmp_path / "clips.gif") as movie:
        assert movie.n_frames == 8  # forwards and backwards
        assert movie.size == (2 * SIDE * 10, 2 * SIDE * 10)
    with Image.open(tmp_path / "clips.png") as grid:
        assert grid.width > grid.height
