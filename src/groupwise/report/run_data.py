"""A run folder, read for the report. A run in progress is read up to its last complete step.

The folder may come from somebody else: what a run of ours would not have written is left out here, with a warning, so
that the page can rely on the types of what it shows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.core.errors import UserError
from groupwise.core.io.files import ignore_message, open_regular, read_bytes
from groupwise.core.io.json_types import is_number
from groupwise.training.run_folder.folder import METRICS, OLDER_SAMPLES, SAMPLES, RunFolder

MAX_LOG_BYTES = 256 << 20
"""Some hundred thousand steps: a page of more would not open in a browser."""
_MAX_IMAGE_BYTES = 16 << 20
_MAX_IMAGES = 64
_FIRST_BYTES = {".png": b"\x89PNG\r\n\x1a\n", ".gif": b"GIF8"}
_STAGES = ("rollout", "update")
_DURING = re.compile(r"step ([1-9][0-9]{0,15})")
"""A moment of an evaluation in eval.json."""


@dataclass(frozen=True)
class RunData:
    """The files of one run."""

    name: str
    config: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    """The lines of metrics.jsonl."""
    samples: Sequence[Mapping[str, Any]]
    evaluation: Mapping[str, Mapping[str, float]]
    """The metrics of each moment in eval.json."""
    plan: Mapping[str, Any]
    images: Mapping[str, bytes]
    """The content of .png and .gif files by name, the oldest first."""


def read_run(path: Path, warn: Callable[[str], None] = ignore_message) -> RunData:
    """Refuses a folder without a finished step, and files that are links or too large."""
    folder = RunFolder(path)
    for name in (METRICS, SAMPLES, OLDER_SAMPLES):
        if (path / name).is_file():
            open_regular(path / name, max_bytes=MAX_LOG_BYTES).close()
    steps = [_clean_step(entry) for entry in folder.metrics(warn)]
    if not steps:
        raise UserError(
            f"{path} holds no run with a finished step: metrics.jsonl is missing or empty. Name the folder of a run,"
            " such as runs/chat."
        )
    evaluation, plan = folder.read("eval.json"), folder.read("plan.json")
    if plan and not _is_plan(plan):
        warn("plan.json is not a memory plan, and left out.")
    return RunData(
        name=path.resolve().name,
        config=folder.read("config.json"),
        steps=steps,
        samples=folder.samples(warn),
        evaluation={moment: _numbers(metrics) for moment, metrics in evaluation.items() if isinstance(metrics, dict)},
        plan=plan if _is_plan(plan) else {},
        images=dict(_read_images(path, warn)),
    )


def _clean_step(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl with nothing but finite numbers."""
    memory = entry.get("memory_bytes")
    return {
        **_numbers(entry),
        "step": entry["step"],
        "memory_bytes": _numbers(memory) if isinstance(memory, dict) else {},
    }


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if is_number(value)}


def _is_plan(plan: Mapping[str, Any]) -> bool:
    """Whether it has what the chart of the plan shows."""
    settings = plan.get("settings")
    return (
        _is_size(plan.get("device_bytes"), least=1)
        and isinstance(settings, dict)
        and settings != {}
        and all(_has_parts(setting) for setting in settings.values())
    )


def _has_parts(setting: object) -> bool:
    parts = setting.get("parts") if isinstance(setting, dict) else None
    stages = [parts.get(stage) for stage in _STAGES] if isinstance(parts, dict) else [None]
    return all(isinstance(stage, dict) and all(map(_is_size, stage.values())) for stage in stages)


def _is_size(value: Any, *, least: float = 0) -> bool:
    return is_number(value) and value >= least


def _read_images(folder: Path, warn: Callable[[str], None]) -> Iterator[tuple[str, bytes]]:
    """Regular files that begin as their format does: a link could lead to any file of the reader's machine."""
    images = [path for path in folder.iterdir() if path.suffix in _FIRST_BYTES]
    if len(images) > _MAX_IMAGES:
        warn(f"{len(images)} images: only the newest {_MAX_IMAGES} are shown.")
    for path in sorted(images, key=_modified)[-_MAX_IMAGES:]:
        try:
            content = read_bytes(path, max_bytes=_MAX_IMAGE_BYTES)
        except UserError as error:
            warn(f"An image is left out. {error}")
            continue
        if content.startswith(_FIRST_BYTES[path.suffix]):
            yield path.name, content
        else:
            warn(f"{path.name} is left out: it is no {path.suffix.removeprefix('.')} image.")


def _modified(image: Path) -> tuple[int, str]:
    return image.lstat().st_mtime_ns, image.name


def metric_series(run: RunData) -> dict[str, list[tuple[float, float]]]:
    """(step, value) of each metric in metrics.jsonl, memory in GiB. Steps without a value are left out."""
    series: dict[str, list[tuple[float, float]]] = {}
    for entry in run.steps:
        memory = entry["memory_bytes"]
        gib = {f"memory, {name}": memory[name] / 2**30 for name in ("peak", "predicted", "host") if name in memory}
        for name, value in {**entry, **gib}.items():
            if name not in ("step", "memory_bytes"):
                series.setdefault(name, []).append((entry["step"] + 1, value))
    return series


def held_out_series(run: RunData) -> dict[str, list[tuple[float, float]]]:
    """(steps done, value) of each metric of eval.json, before, during and after training."""
    last = run.steps[-1]["step"] + 1
    during = (int(match[1]) for moment in run.evaluation if (match := _DURING.fullmatch(moment)))
    moments = {"before": 0, **{f"step {step}": step for step in sorted(during) if step < last}, "after": last}
    series: dict[str, list[tuple[float, float]]] = {}
    for moment, step in moments.items():
        for name, value in run.evaluation.get(moment, {}).items():
            series.setdefault(name, []).append((step, value))
    return series
