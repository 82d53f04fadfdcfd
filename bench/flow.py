"""What the flow workload's shortcuts bring, and what wrong grouping costs, on the embedded model.

    window    the recipe: two neighbouring steps are drawn and trained, members share what comes before
    all       every step but the last is drawn and trained
    usual     the loop as it is usually written (bench/flow_usual.py): every step, stored twice, encodings recomputed,
              rewards normalized by prompt
    regrouped the usual loop with rewards normalized by condition: what of its result is due to its groups
    global    the recipe with all rollouts of a step in one group, which Groupwise refuses to do by itself

Runs of one seed take turns step by step, so that a slow spell of the machine meets all of them alike. Seconds are of
the process's own CPU time. Below the comparison: how far rewards of one group lie apart, and those of a whole step.

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
KINDS = ("window", "all", "usual", "regrouped", "global")


@dataclass
class Run:
    """One method on one seed, a step at a time."""

    setup: Setup
    take_step: Callable[[], None]
    stored: Callable[[], int]
    seconds: float = 0.0
    before: float = 0.0
    after: float = 0.0
    spreads: list[tuple[float, float]] = field(default_factory=list)
    """Of each step's rewards: the mean over groups of their standard deviation, and that of all of them."""

    def held_out(self) -> float:
        with torch.no_grad():
            return self.setup.workload.evaluate()["held-out reward"]


def main(steps: int = 40, seeds: int = 3, kinds: tuple[str, ...] = KINDS) -> None:
    """Print a line a run, and the comparison.

    Args:
        steps: Of each run.
        seeds: Runs of each method.
        kinds: Which methods to run.
    """
    found: dict[str, list[Run]] = {kind: [] for kind in kinds}
    for seed in range(seeds):
        runs = {kind: _run(kind, steps, seed) for kind in kinds}
        for run in runs.values():
            run.before = run.held_out()
        for _ in range(steps):
            for run in runs.values():
                begun = time.process_time()
                run.take_step()
                run.seconds += time.process_time() - begun
        for kind, run in runs.items():
            run.after = run.held_out()
            found[kind].append(run)
            _CONSOLE.print(
                f"{kind}, seed {seed}: held-out reward {run.before:.4f} -> {run.after:.4f}, {run.seconds / steps:.2f} s"
                f" a step, {run.stored() / 2**20:.2f} MiB of trajectories"
            )
    _summary(found, steps)


def _run(kind: str, steps: int, seed: int) -> Run:
    config = load_recipe("flow")
    sampling = config.workload.sampling  # type: ignore[attr-defined]
    if kind in ("all", "usual", "regrouped"):
        sampling = replace(sampling, window=WindowConfig("all"))
    config = replace(config, workload=replace(config.workload, sampling=sampling), steps=steps, seed=seed)
    setup = set_up(config)
    if kind in ("usual", "regrouped"):
        usual = UsualLoop(setup, by_prompt=kind == "usual")
        epochs = iter(range(steps))
        return Run(setup, lambda: _ignore(usual.epoch(next(epochs))), lambda: usual.stored_bytes)
    kept = _remember_bytes(setup)
    training = loop.training_steps(setup)
    spreads: list[tuple[float, float]] = []
    comparing = _comparing(spreads, one_group=kind == "global")
    return Run(setup, lambda: _next(training, comparing), lambda: kept[-1], spreads=spreads)


def _next(training: Iterator[loop.StepResult], comparing: Callable[..., Advantages]) -> None:
    """A step whose rollouts are compared in this way."""
    loop.compute_advantages = comparing  # type: ignore[attr-defined]
    next(training)
    loop.compute_advantages = compute_advantages  # type: ignore[attr-defined]


def _comparing(spreads: list[tuple[float, float]], *, one_group: bool) -> Callable[..., Advantages]:
    """Group by group, or with all rollouts in one; notes how far rewards lie apart."""

    def heard(rewards: Rewards, group_ids: torch.Tensor, config: AdvantageConfig | None = None) -> Advantages:
        groups = [rewards.total[group_ids == each] for each in group_ids.unique()]
        within = statistics.mean(group.std(correction=0).item() for group in groups)
        spreads.append((within, rewards.total.std(correction=0).item()))
        return compute_advantages(rewards, torch.zeros_like(group_ids) if one_group else group_ids, config)

    return heard


def _remember_bytes(setup: Setup) -> list[int]:
    """Listens to rollouts for the size of what they keep."""
    kept: list[int] = []
    assert isinstance(setup.workload, FlowWorkload)
    rollout = setup.workload.rollout

    def listening(rows: object) -> Rollouts:
        rollouts = rollout(rows)  # type: ignore[arg-type]
        kept.append(rollouts.data["path"].nbytes + rollouts.data["latents"].nbytes)
        return rollouts

    setup.workload.rollout = listening  # type: ignore[method-assign]
    return kept


def _ignore(_: float) -> None:
    return None


def _summary(found: dict[str, list[Run]], steps: int) -> None:
    table = Table(title=f"{steps} steps, mean over seeds (lowest to highest)", title_justify="left")
    for name in (
        "method",
        "held-out before",
        "after",
        "gain",
        "CPU s a step",
        "MiB kept",
        "time of window's",
        "memory of window's",
    ):
        table.add_column(name, justify="left" if name == "method" else "right")
    base = found.get("window")
    for kind, runs in found.items():
        gains = [run.after - run.before for run in runs]
        seconds = statistics.mean(run.seconds / steps for run in runs)
        cells = [kind, f"{statistics.mean(run.before for run in runs):.4f}"]
        cells.append(f"{statistics.mean(run.after for run in runs):.4f}")
        cells.append(f"{statistics.mean(gains):+.4f} ({min(gains):+.4f} to {max(gains):+.4f})")
        cells += [f"{seconds:.2f}", f"{runs[0].stored() / 2**20:.2f}"]
        if base:
            cells.append(f"{seconds / statistics.mean(run.seconds / steps for run in base):.2f} x")
            cells.append(f"{runs[0].stored() / base[0].stored():.2f} x")
        table.add_row(*cells)
    _CONSOLE.print(table)
    if base:
        within, everyone = (
            statistics.mean(each) for each in zip(*(s for run in base for s in run.spreads), strict=True)
        )
        _CONSOLE.print(
            f"Rewards of one group lie {within:.4f} apart (standard deviation), those of a step {everyone:.4f}."
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    tyro.cli(main)
