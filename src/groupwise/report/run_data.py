"""What a run folder holds, read for showing. A run that is still going is read as far as it has come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.core.errors import UserError
from groupwise.core.files import read_jsonl
from groupwise.training.run_folder import RunFolder

_PICTURES = ("*.png", "*.gif")


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
    pictures: Sequence[Path]


def read_run(path: Path) -> RunData:
    folder = RunFolder(path)
    steps = folder.metrics()
    if not steps:
        raise UserError(
            f"{path} holds no run with a finished step (no metrics.jsonl with a line in it). Name the folder of a run,"
            " such as runs/chat."
        )
    return RunData(
        name=path.resolve().name,
        config=folder.read("config.json"),
        steps=steps,
        samples=read_jsonl(path / "samples.jsonl"),
        evaluation=folder.read("eval.json"),
        plan=folder.read("plan.json"),
        pictures=sorted((found for pattern in _PICTURES for found in path.glob(pattern)), key=_age),
    )


def _age(picture: Path) -> tuple[int, str]:
    return picture.stat().st_mtime_ns, picture.name


def metrics(run: RunData) -> dict[str, list[tuple[float, float]]]:
    """Every number of metrics.jsonl over the steps, memory in GiB; where a step has none, the line goes on."""
    found: dict[str, list[tuple[float, float]]] = {}
    for entry in run.steps:
        memory = entry.get("memory_bytes", {})
        gib = {f"memory, {name}": memory[name] / 2**30 for name in ("peak", "predicted", "host") if name in memory}
        for name, value in {**entry, **gib}.items():
            if name != "step" and isinstance(value, int | float):
                found.setdefault(name, []).append((entry["step"] + 1, float(value)))
    return found
