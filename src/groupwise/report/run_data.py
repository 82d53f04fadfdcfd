"""A run folder, read for the report. A run in progress is read up to its last complete step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.core.errors import UserError
from groupwise.core.files import read_jsonl
from groupwise.training.run_folder import RunFolder

_IMAGES = ("*.png", "*.gif")


@dataclass(frozen=True)
class RunData:
    """The files of one run."""

    name: str
    config: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    """The lines of metrics.jsonl."""
    samples: Sequence[Mapping[str, Any]]
    evaluation: Mapping[str, Any]
    plan: Mapping[str, Any]
    images: Sequence[Path]


def read_run(path: Path) -> RunData:
    folder = RunFolder(path)
    steps = folder.metrics()
    if not steps:
        raise UserError(
            f"{path} holds no run with a finished step: metrics.jsonl is missing or empty. Name the folder of a run,"
            " such as runs/chat."
        )
    return RunData(
        name=path.resolve().name,
        config=folder.read("config.json"),
        steps=steps,
        samples=read_jsonl(path / "samples.jsonl"),
        evaluation=folder.read("eval.json"),
        plan=folder.read("plan.json"),
        images=sorted((image for pattern in _IMAGES for image in path.glob(pattern)), key=_modified),
    )


def _modified(image: Path) -> tuple[int, str]:
    return image.stat().st_mtime_ns, image.name


def metric_series(run: RunData) -> dict[str, list[tuple[float, float]]]:
    """(step, value) of every metric in metrics.jsonl, memory in GiB. Steps without a value are left out."""
    series: dict[str, list[tuple[float, float]]] = {}
    for entry in run.steps:
        memory = entry.get("memory_bytes", {})
        gib = {f"memory, {name}": memory[name] / 2**30 for name in ("peak", "predicted", "host") if name in memory}
        for name, value in {**entry, **gib}.items():
            if name != "step" and isinstance(value, int | float):
                series.setdefault(name, []).append((entry["step"] + 1, float(value)))
    return series
