"""TensorBoard, wandb and trackio by name, through Accelerate's trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from PIL import Image

from groupwise.core.errors import UserError


class Trackers:
    """Sends metrics and images to the trackers that the user named; to none by default."""

    def __init__(self, names: Sequence[str], folder: Path, config: Mapping[str, Any]):
        self._accelerator: Accelerator | None = None
        if names:
            self._accelerator = Accelerator(cpu=True, log_with=list(names), project_dir=folder)
            init_kwargs = {name: {"name": folder.name} for name in names if name != "tensorboard"}
            self._accelerator.init_trackers("groupwise", config=_flatten(config), init_kwargs=init_kwargs)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._accelerator:
            self._accelerator.log(dict(metrics), step=step)

    def log_images(self, images: Mapping[str, Path], step: int) -> None:
        """PNG files by name; other files are left out."""
        for tracker in self._accelerator.trackers if self._accelerator else ():
            for name, path in images.items():
                if path.suffix == ".png":
                    _log_image(tracker, name, path, step)

    def close(self) -> None:
        if self._accelerator:
            self._accelerator.end_training()


def _log_image(tracker: GeneralTracker, name: str, path: Path, step: int) -> None:
    if tracker.name == "tensorboard":
        pixels = np.asarray(Image.open(path).convert("RGB"))
        tracker.log_images({name: pixels[None]}, step=step, dataformats="NHWC")
    else:  # wandb and trackio have a class of this name
        tracker.log({name: import_module(tracker.name).Image(str(path))}, step=step)


def check_installed(names: Sequence[str]) -> None:
    """Refuse a tracker that is not installed, before anything is written."""
    for name in names:
        if find_spec(name) is None:
            raise UserError(
                f"trackers names '{name}', which is not installed. Install it with `pip install {name}`, or leave it"
                " out: metrics.jsonl holds the same metrics."
            )


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Nested settings as one level of plain values, the only form trackers accept."""
    flat: dict[str, str | int | float | bool] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value if isinstance(value, str | int | float | bool) else str(value)
    return flat
