"""Thousands of steps of a recipe in shrunken form: does memory, the number of open files or the time of a step grow?

    python bench/soak.py RECIPE [--steps 2000] [--run-dir FOLDER]

Prints one JSON object. Each figure is a median over a tenth of the steps; the first tenth is warm-up, so the second is
compared with the last. `growth_per_1000_steps` is the slope of a straight line through all steps but the first tenth.
Where the machine has other work, of the times only `step_cpu_ms` means something.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import psutil

import groupwise as gw
from groupwise.recipes import load_recipe
from groupwise.training.loop import train_step
from groupwise.training.progress import ProgressDisplay
from groupwise.training.run import StepLog
from groupwise.training.run_folder.folder import RunFolder
from groupwise.training.setup import set_up

SMALLER: dict[str, Any] = {
    "mosaics": 24,
    "held_out_mosaics": 1,
    "estimator": "proportional",
    "scenes": 8,
    "held_out_scenes": 2,
    "max_new_tokens": 12,
    "num_prompts": 4,
    "samples_per_prompt": 1,
}
"""Settings of workloads, wherever they are: less data and shorter rollouts, the same code."""


def shrink(settings: Any) -> Any:
    """The settings with the values of SMALLER where they have such a field."""
    changes: dict[str, Any] = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name in SMALLER:
            changes[field.name] = SMALLER[field.name]
        elif is_dataclass(value):
            changes[field.name] = shrink(value)
    return replace(settings, **changes)


def small_recipe(name: str, *, steps: int, **run: Any) -> gw.Config:
    """Two groups of two rollouts a step."""
    config = load_recipe(name)
    shape = {"steps": steps, "conditions_per_step": 2, "group_size": 2, "rows_per_pass": 4}
    quiet = {"samples_per_step": 2, "show_samples_every": 0, "preflight": False}
    return replace(config, workload=shrink(config.workload), run=replace(config.run, **{**quiet, **run}), **shape)


def soak(config: gw.Config, folder: Path) -> dict[str, Any]:
    """Train with logs and checkpoints as `train` does, and measure after each step."""
    setup, run_folder, process = set_up(config), RunFolder(folder), psutil.Process()
    run_folder.lock(resume=False)
    rows: list[dict[str, float]] = []
    display = ProgressDisplay(config, silent=True)
    with StepLog(setup, run_folder, display) as log:
        while setup.state.step < config.steps:
            begun, begun_cpu = time.perf_counter(), time.process_time()
            log.record(train_step(setup))
            seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - begun_cpu
            if setup.state.step % config.run.checkpoint_every == 0:
                log.save()
            rows.append(
                {
                    "memory_mib": process.memory_info().rss / 2**20,
                    "open_files": float(process.num_fds()),
                    "threads": float(threading.active_count()),
                    "step_ms": 1e3 * seconds,
                    "step_cpu_ms": 1e3 * cpu_seconds,
                }
            )
    run_folder.release()
    disk_mib = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20
    return {"steps": len(rows), "disk_mib": round(disk_mib, 2), **{name: _growth(rows, name) for name in rows[0]}}


def _growth(rows: list[dict[str, float]], name: str) -> dict[str, float]:
    values = [row[name] for row in rows]
    tenth = max(1, len(values) // 10)
    steady = values[tenth:]
    slope = statistics.linear_regression(range(len(steady)), steady).slope if len(steady) > 1 else 0.0
    figures = {
        "second_tenth": statistics.median(values[tenth : 2 * tenth] or values),
        "last_tenth": statistics.median(values[-tenth:]),
        "growth_per_1000_steps": 1000 * slope,
    }
    return {key: round(value, 3) for key, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--run-dir", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.run_dir or Path(temporary) / "run"
        config = small_recipe(arguments.recipe, steps=arguments.steps, run_dir=folder)
        print(json.dumps({"recipe": arguments.recipe, **soak(config, folder)}, indent=1))


if __name__ == "__main__":
    main()
