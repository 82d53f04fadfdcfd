"""TensorBoard, wandb and trackio by name, through Accelerate's trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from groupwise.core.errors import UserError


class Trackers:
    """Sends metrics to the trackers that the user named; to none by default."""

    def __init__(self, names: Sequence[str], folder: Path, config: Mapping[str, Any]):
        self._accelerator: Accelerator | None = None
        if names:
            self._accelerator = Accelerator(cpu=True, log_with=list(names), project_dir=folder)
            init_kwargs = {name: {"name": folder.name} for name in names if name != "tensorboard"}
            self._accelerator.init_trackers("groupwise", config=_flatten(config), init_kwargs=init_kwargs)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._accelerator:
            self._accelerator.log(dict(metrics), step=step)

    def close(self) -> None:
        if self._accelerator:
            self._accelerator.end_training()


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
