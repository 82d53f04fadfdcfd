"""Images of sample clips: a grid of frames with the camera paths beside them, and an animation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.workloads.flow.cameras import rotation_errors, split_pose
from groupwise.workloads.flow.task import Condition
from groupwise.workloads.flow.tasks.plane.rewards import estimate_camera
from groupwise.workloads.flow.tasks.plane.scene import Scenes, brightness, render_clip

_PIXEL_SIZE = 10
_REQUESTED_COLOR, _ESTIMATED_COLOR = "#444444", "#d62728"


def draw_grid(conditions: Sequence[Condition], clips: Tensor) -> Callable[[Path], None]:
    """One row per condition: source, requested clip, generated clip, and both camera paths."""

    def draw(path: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 1.7 * len(conditions)), layout="constrained")
        axes = figure.subplots(len(conditions), 4, width_ratios=[3, 3, 3, 1.4], squeeze=False)
        requested, estimated = _requested_clips(conditions), _estimated_cameras(conditions, clips)
        for index, (condition, row) in enumerate(zip(conditions, axes, strict=True)):
            assert condition.source_clip is not None
            assert condition.camera is not None
            titles = ("source", f"requested: {condition.prompt}", "generated")
            columns = (condition.source_clip, requested[index], clips[index])
            for title, clip, axis in zip(titles, columns, row[:3], strict=True):
                axis.imshow(_side_by_side(clip), interpolation="nearest")
                axis.set_title(title, fontsize=8)
                axis.set_axis_off()
            _draw_paths(row[3], condition.camera, estimated[index])
        figure.savefig(path, dpi=110)

    return draw


def draw_gif(conditions: Sequence[Condition], clips: Tensor) -> Callable[[Path], None]:
    """Requested clips beside generated ones, frame by frame, forwards and backwards."""

    def draw(path: Path) -> None:
        from PIL import Image

        pairs = zip(_requested_clips(conditions), clips, strict=True)
        rows = [np.concatenate([_pixels(requested), _pixels(clip)], axis=2) for requested, clip in pairs]
        movie = np.concatenate(rows, axis=1).repeat(_PIXEL_SIZE, axis=1).repeat(_PIXEL_SIZE, axis=2)
        frames = [Image.fromarray(frame) for frame in (*movie, *movie[-2:0:-1])]
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=250, loop=0)

    return draw


def _requested_clips(conditions: Sequence[Condition]) -> Tensor:
    """What a camera on the requested path would show."""
    cameras = torch.stack([condition.camera for condition in conditions if condition.camera is not None])
    return render_clip(_scenes(conditions), cameras) * _light(conditions)


def _estimated_cameras(conditions: Sequence[Condition], clips: Tensor) -> Tensor:
    return estimate_camera(_scenes(conditions), clips / _light(conditions)).camera


def _light(conditions: Sequence[Condition]) -> Tensor:
    return brightness([condition.prompt for condition in conditions])


def _scenes(conditions: Sequence[Condition]) -> Scenes:
    return Scenes.concatenate([condition.reward_columns["scene"] for condition in conditions])


def _draw_paths(axis: Any, requested: Tensor, estimated: Tensor) -> None:
    """The point of the plane at the center of the frame, frame by frame."""
    cameras = ((requested, _REQUESTED_COLOR, "requested"), (estimated, _ESTIMATED_COLOR, "estimated"))
    for camera, color, name in cameras:
        rotation, origin = split_pose(camera)
        forward = rotation[:, :, 2]
        center = origin[:, :2] + (1 - origin[:, 2:]) / forward[:, 2:].clamp(min=0.2) * forward[:, :2]
        axis.plot(*center.T.numpy(), marker="o", markersize=3, color=color, label=name, linewidth=1)
    axis.set_title(f"rotation error {rotation_errors(estimated, requested).mean():.3f} rad", fontsize=7)
    axis.set_aspect("equal", adjustable="datalim")
    axis.invert_yaxis()
    axis.tick_params(labelsize=5)
    axis.legend(fontsize=5, loc="upper right")


def _side_by_side(clip: Tensor) -> np.ndarray[Any, Any]:
    return np.concatenate(list(_pixels(clip)), axis=1)


def _pixels(clip: Tensor) -> np.ndarray[Any, Any]:
    """[frames, height, width, 3] bytes."""
    return ((clip.clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 3, 0).numpy()
