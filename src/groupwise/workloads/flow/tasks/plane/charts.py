"""Clips to look at: a strip of frames with the camera's path drawn beside it, and an animation."""

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

_ENLARGED = 10
_WANTED, _FOUND = "#444444", "#d62728"


def draw_strip(conditions: Sequence[Condition], clips: Tensor) -> Callable[[Path], None]:
    """A row a condition: source, what was asked for, what was made, and both camera paths."""

    def draw(path: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 1.7 * len(conditions)), layout="constrained")
        axes = figure.subplots(len(conditions), 4, width_ratios=[3, 3, 3, 1.4], squeeze=False)
        truth, found = _truth(conditions), _found(conditions, clips)
        for nth, (condition, row) in enumerate(zip(conditions, axes, strict=True)):
            assert condition.source is not None
            assert condition.camera is not None
            shown = {"source": condition.source, f"asked: {condition.prompt}": truth[nth], "made": clips[nth]}
            for (title, clip), axis in zip(shown.items(), row, strict=False):
                axis.imshow(_side_by_side(clip), interpolation="nearest")
                axis.set_title(title, fontsize=8)
                axis.set_axis_off()
            _draw_paths(row[3], condition.camera, found[nth])
        figure.savefig(path, dpi=110)

    return draw


def draw_gif(conditions: Sequence[Condition], clips: Tensor) -> Callable[[Path], None]:
    """What was asked for beside what was made, frame by frame."""

    def draw(path: Path) -> None:
        from PIL import Image

        truth = _truth(conditions)
        rows = [np.concatenate([_pixels(truth[nth]), _pixels(clips[nth])], axis=2) for nth in range(len(conditions))]
        movie = np.concatenate(rows, axis=1).repeat(_ENLARGED, axis=1).repeat(_ENLARGED, axis=2)
        frames = [Image.fromarray(frame) for frame in (*movie, *movie[-2:0:-1])]
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=250, loop=0)

    return draw


def _truth(conditions: Sequence[Condition]) -> Tensor:
    """What the camera would have seen."""
    light = brightness([each.prompt for each in conditions]).view(-1, 1, 1, 1, 1)
    return render_clip(_scenes(conditions), _cameras(conditions)) * light


def _found(conditions: Sequence[Condition], clips: Tensor) -> Tensor:
    light = brightness([each.prompt for each in conditions]).view(-1, 1, 1, 1, 1)
    return estimate_camera(_scenes(conditions), clips / light).camera


def _scenes(conditions: Sequence[Condition]) -> Scenes:
    return Scenes.stacked([each.columns["scene"] for each in conditions])


def _cameras(conditions: Sequence[Condition]) -> Tensor:
    return torch.stack([each.camera for each in conditions if each.camera is not None])


def _draw_paths(axis: Any, wanted: Tensor, found: Tensor) -> None:
    """Where the middle of the picture looks on the plane, frame by frame."""
    for camera, color, name in ((wanted, _WANTED, "asked"), (found, _FOUND, "found")):
        rotation, origin = split_pose(camera)
        ahead = rotation[:, :, 2]
        gaze = origin[:, :2] + (1 - origin[:, 2:]) / ahead[:, 2:].clamp(min=0.2) * ahead[:, :2]
        axis.plot(*gaze.T.numpy(), marker="o", markersize=3, color=color, label=name, linewidth=1)
    axis.set_title(f"rotation error {rotation_errors(found, wanted).mean():.3f} rad", fontsize=7)
    axis.set_aspect("equal", adjustable="datalim")
    axis.invert_yaxis()
    axis.tick_params(labelsize=5)
    axis.legend(fontsize=5, loc="upper right")


def _side_by_side(clip: Tensor) -> np.ndarray[Any, Any]:
    return np.concatenate(list(_pixels(clip)), axis=1)


def _pixels(clip: Tensor) -> np.ndarray[Any, Any]:
    """[frames, height, width, 3] bytes."""
    return ((clip.clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 3, 0).numpy()
