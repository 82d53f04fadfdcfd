"""The trained window and correct groups, compared with the usual loop, on the embedded model.

    window     the recipe: two neighboring steps are sampled and trained, members share the steps before them
    all        every step but the last is sampled and trained
    usual      the loop as it is usually written (bench/flow_usual.py): every step, stored twice, conditions encoded
               again, rewards normalized by prompt
    regrouped  the usual loop with rewards normalized by condition: the part of its result that is due to its groups
    global     the recipe with all rollouts of a step in one group, which Groupwise refuses to do by itself

Runs of one seed are interleaved step by step, so a slowdown of the machine affects all of them equally. Seconds are the
process's CPU time. Below the comparison: the standard deviation of rewards within a group and within a step.

    python bench/flow.py --steps 40 --seeds 3
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
import tyro
from flow_usual import UsualLoop
from rich.console import Console
from rich.table import Table

from groupwise.core.advantage import compute_advantages
from groupwise.core.config import AdvantageConfig
from groupwise.core.reward import Rewards
from groupwise.core.types import Advantages, Rollouts
from groupwise.recipes import load_recipe
from groupwise.training import loop
from groupwise.training.run import Setup, set_up
from groupwise.workloads.flow.sampling.schedule import WindowConfig
from groupwise.workloads.flow.workload import FlowWorkload

_CONSOLE = Console(soft_wrap=True, highlight=False, width=150)
METHODS = ("window", "all", "usual", "regrouped", "global")


@dataclass
class Run:
    """One method with one seed, step by step."""

    setup: Setup
    take_step: Callable[[], None]
    stored_bytes: Callable[[], int]
    seconds: float = 0.0
    before: float = 0.0
    after: float = 0.0
    spreads: list[tuple[float, float]] = field(default_factory=list)
    """Standard deviations of each step's rewards: within a group (mean over groups), and within the step."""

    def held_out(self) -> float:
        with torch.no_grad():
            return self.setup.workload.evaluate()["held-out reward"]


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
        for _ in range(steps):
            for run in runs.values():
                started = time.process_time()
                run.take_step()
                run.seconds += time.process_time() - started
        for method, run in runs.items():
            run.after = run.held_out()
            finished[method].append(run)
            _CONSOLE.print(
                f"{method}, seed {seed}: held-out reward {run.before:.4f} -> {run.after:.4f},"
                f" {run.seconds / steps:.2f} s per step, {run.stored_bytes() / 2**20:.2f} MiB of trajectories"
            )
    _print_summary(finished, steps)


def _run(method: str, steps: int, seed: int) -> Run:
    config = load_recipe("flow")
    sampling = config.workload.sampling  # type: ignore[attr-defined]
    if method in ("all", "usual", "regrouped"):
        sampling = replace(sampling, window=WindowConfig("all"))
    config = replace(config, workload=replace(config.workload, sampling=sampling), steps=steps, seed=seed)
    setup = set_up(config)
    if method in ("usual", "regrouped"):
        usual = UsualLoop(setup, by_prompt=method == "usual")
        epochs = iter(range(steps))
        return Run(setup, lambda: _ignore(usual.epoch(next(epochs))), lambda: usual.stored_bytes)
    stored = _record_stored_bytes(setup)
    training = loop.training_steps(setup.workload, state=setup.state, shape=setup.shape, config=config, comm=setup.comm)
    spreads: list[tuple[float, float]] = []
    compute = _compute_and_record(spreads, one_group=method == "global")
    return Run(setup, lambda: _next(training, compute), lambda: stored[-1], spreads=spreads)


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


def _record_stored_bytes(setup: Setup) -> list[int]:
    """A list that gets the bytes of every rollout's latents."""
    stored: list[int] = []
    assert isinstance(setup.workload, FlowWorkload)
    rollout = setup.workload.rollout

    def recording(rows: object) -> Rollouts:
        rollouts = rollout(rows)  # type: ignore[arg-type]
        stored.append(rollouts.data["window_latents"].nbytes + rollouts.data["latents"].nbytes)
        return rollouts

    setup.workload.rollout = recording  # type: ignore[method-assign]
    return stored


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
        "MiB stored",
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
        cells += [f"{seconds:.2f}", f"{runs[0].stored_bytes() / 2**20:.2f}"]
        if base:
            cells.append(f"{seconds / statistics.mean(run.seconds / steps for run in base):.2f} x")
            cells.append(f"{runs[0].stored_bytes() / base[0].stored_bytes():.2f} x")
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
