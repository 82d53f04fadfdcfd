"""What members of a group share, the trained window and correct groups, compared with other loops on the embedded task.

    window     the recipe: one step is sampled and trained, the next one in the next training step; members share those
               before it
    plain      a plain loop (bench/flow_usual.py) with the same window and correct groups: each member is denoised from
               noise of its own, and nothing is shared
    all        all steps but the last are sampled and trained
    usual      the loop as it is usually written: all steps, stored twice, conditions encoded again, rewards normalized
               by prompt
    regrouped  the usual loop with rewards normalized by condition: the part of its result that is due to its groups
    global     the recipe with all rollouts of a step in one group, which Groupwise refuses to do by itself

Runs of one seed are interleaved step by step, so a slowdown of the machine affects all of them equally. Seconds are the
process's CPU time. Passes of the model are counted in rows: 1 for a forward pass, 3 with its backward
pass. Memory is what torch's allocator hands out at the peak of one more whole step, rollout and update, on top of what
is held before it. Below the comparison: the standard deviation of rewards within a group and within a step.

    python bench/flow.py --steps 40 --seeds 3
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
import tyro
from flow_usual import UsualLoop
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from groupwise.core.advantage import compute_advantages
from groupwise.core.config import AdvantageConfig
from groupwise.core.reward import Rewards
from groupwise.core.types import Advantages
from groupwise.recipes import load_recipe
from groupwise.training import loop
from groupwise.training.evaluate import held_out_metrics
from groupwise.training.run import Setup, set_up
from groupwise.workloads.flow.sampling.schedule import WindowConfig

_CONSOLE = Console(soft_wrap=True, highlight=False, width=150)
METHODS = ("window", "plain", "all", "usual", "regrouped", "global")


@dataclass
class Run:
    """One method with one seed, step by step."""

    setup: Setup
    take_step: Callable[[], None]
    seconds: float = 0.0
    peak_bytes: int = 0
    model_passes: list[int] = field(default_factory=list)
    """Rows of each call of the model; three times as many where its gradient is computed, too."""
    before: float = 0.0
    after: float = 0.0
    spreads: list[tuple[float, float]] = field(default_factory=list)
    """Standard deviations of each step's rewards: within a group (mean over groups), and within the step."""

    def held_out(self) -> float:
        with torch.no_grad():
            return held_out_metrics(self.setup)["held-out reward"]


def main(steps: int = 40, seeds: int = 3, methods: tuple[str, ...] = METHODS) -> None:
    """Print one line per run, then the comparison.

    Args:
        steps: Training steps of each run.
        seeds: Runs of each method.
        methods: Which methods to run.
    """
    finished: dict[str, list[Run]] = {method: [] for method in methods}
    for seed in range(seeds):
        runs = {method: _run(method, steps, seed) for method in methods}
        for run in runs.values():
            run.before = run.held_out()
            run.model_passes = _count_model_passes(run.setup)
        for _ in range(steps):
            for run in runs.values():
                started = time.process_time()
                run.take_step()
                run.seconds += time.process_time() - started
        for method, run in runs.items():
            passes = sum(run.model_passes) / (steps * run.setup.shape.rollouts_per_step)
            run.after = run.held_out()
            run.peak_bytes = _peak_bytes(run.take_step)
            finished[method].append(run)
            _CONSOLE.print(
                f"{method}, seed {seed}: held-out reward {run.before:.4f} -> {run.after:.4f},"
                f" {run.seconds / steps:.2f} s per step, {passes:.2f} passes of the model per rollout,"
                f" {run.peak_bytes / 2**20:.1f} MiB at the peak"
            )
    _print_summary(finished, steps)


def _run(method: str, steps: int, seed: int) -> Run:
    config = load_recipe("flow")
    sampling = config.workload.sampling  # type: ignore[attr-defined]
    if method in ("all", "usual", "regrouped"):
        sampling = replace(sampling, window=WindowConfig("all"))
    config = replace(config, workload=replace(config.workload, sampling=sampling), steps=steps + 1, seed=seed)
    setup = set_up(config)
    if method in ("plain", "usual", "regrouped"):
        usual = UsualLoop(setup, by_prompt=method == "usual", encode_again=method != "plain")
        epochs = iter(range(steps + 1))
        return Run(setup, lambda: _ignore(usual.epoch(next(epochs))))
    training = loop.training_steps(setup)
    spreads: list[tuple[float, float]] = []
    compute = _compute_and_record(spreads, one_group=method == "global")
    return Run(setup, lambda: _next(training, compute), spreads=spreads)


def _next(training: Iterator[loop.StepResult], compute: Callable[..., Advantages]) -> None:
    """A step with these advantages."""
    loop.compute_advantages = compute  # type: ignore[attr-defined]
    next(training)
    loop.compute_advantages = compute_advantages  # type: ignore[attr-defined]


def _compute_and_record(spreads: list[tuple[float, float]], *, one_group: bool) -> Callable[..., Advantages]:
    """Advantages by group, or with all rollouts in one group; records the spread of the rewards."""

    def compute(rewards: Rewards, group_ids: torch.Tensor, config: AdvantageConfig | None = None) -> Advantages:
        groups = [rewards.total[group_ids == group_id] for group_id in group_ids.unique()]
        within = statistics.mean(group.std(correction=0).item() for group in groups)
        spreads.append((within, rewards.total.std(correction=0).item()))
        return compute_advantages(rewards, torch.zeros_like(group_ids) if one_group else group_ids, config)

    return compute


def _count_model_passes(setup: Setup) -> list[int]:
    """A list that gets the rows of each call. A backward pass costs as much as two forward passes."""
    passes: list[int] = []
    model = setup.workload.model  # type: ignore[attr-defined]
    velocity = model.velocity

    def counting(latents: torch.Tensor, *inputs: object) -> torch.Tensor:
        passes.append(len(latents) * (3 if torch.is_grad_enabled() else 1))
        return velocity(latents, *inputs)

    model.velocity = counting
    return passes


def _peak_bytes(step: Callable[[], None]) -> int:
    """What the allocator hands out at the peak of a step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(size for _, size in sizes))


def _ignore(_: float) -> None:
    return None


def _print_summary(finished: dict[str, list[Run]], steps: int) -> None:
    table = Table(title=f"{steps} steps, mean over seeds (lowest to highest)", title_justify="left")
    for name in (
        "method",
        "held-out before",
        "after",
        "gain",
        "CPU s per step",
        "MiB at the peak",
        "time / window",
        "memory / window",
    ):
        table.add_column(name, justify="left" if name == "method" else "right")
    base = finished.get("window")
    for method, runs in finished.items():
        gains = [run.after - run.before for run in runs]
        seconds = statistics.mean(run.seconds / steps for run in runs)
        cells = [method, f"{statistics.mean(run.before for run in runs):.4f}"]
        cells.append(f"{statistics.mean(run.after for run in runs):.4f}")
        cells.append(f"{statistics.mean(gains):+.4f} ({min(gains):+.4f} to {max(gains):+.4f})")
        cells += [f"{seconds:.2f}", f"{runs[0].peak_bytes / 2**20:.1f}"]
        if base:
            cells.append(f"{seconds / statistics.mean(run.seconds / steps for run in base):.2f} x")
            cells.append(f"{runs[0].peak_bytes / base[0].peak_bytes:.2f} x")
        table.add_row(*cells)
    _CONSOLE.print(table)
    if base:
        spreads = zip(*(spread for run in base for spread in run.spreads), strict=True)
        within_group, within_step = (statistics.mean(values) for values in spreads)
        _CONSOLE.print(
            f"Standard deviation of rewards: {within_group:.4f} within a group, {within_step:.4f} within a step."
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    tyro.cli(main)
