"""`groupwise train RECIPE`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean
from typing import TYPE_CHECKING

from groupwise.cli.arguments import print_json, quiet_stdout, read_config
from groupwise.training.run_folder import RunFolder

if TYPE_CHECKING:
    from groupwise.training.run import MeanAndStd, RunSummary

_BLOCKS = "▁▂▃▄▅▆▇█"

DESCRIPTION = (
    "Train a recipe. The run folder receives config.json, metrics.jsonl (one object a step), samples.jsonl, eval.json"
    " and checkpoints/. Ctrl-C writes a checkpoint and leaves; --resume goes on, bit by bit as if never stopped."
)


def run(words: list[str], as_json: bool) -> int:
    config = read_config("train", words, DESCRIPTION)
    from groupwise.dist.comm import disconnect
    from groupwise.training.run import train

    with quiet_stdout(as_json):
        summary = train(config)
    disconnect()
    if summary.is_main:
        if as_json:
            print_json({**asdict(summary), "run_dir": str(summary.run_dir)})
        else:
            _show(summary)
    return 130 if summary.interrupted else 0


def _show(summary: RunSummary) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{summary.run_dir}: {summary.steps} steps in {summary.seconds:.1f} s", title_justify="left")
    table.add_column("measured")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    table.add_row(
        "reward, mean ± std of the first tenth -> last tenth of steps",
        _mean_and_std(summary.reward_first_tenth),
        _mean_and_std(summary.reward_last_tenth),
    )
    for name, after in summary.eval_after.items():
        table.add_row(name, _figure(summary.eval_before.get(name)), _figure(after))
    console = Console(file=sys.stdout)
    console.print(table)
    rewards = [entry["reward"] for entry in RunFolder(summary.run_dir).metrics() if entry["reward"] is not None]
    console.print(f"reward by step  {sparkline(rewards)}", highlight=False)


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """A line of blocks from the lowest to the highest value, each the mean of a stretch of steps."""
    stretches = min(width, len(values))
    means = [mean(values[n * len(values) // stretches : (n + 1) * len(values) // stretches]) for n in range(stretches)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    blocks = "".join(_BLOCKS[round((value - low) / (high - low or 1) * (len(_BLOCKS) - 1))] for value in means)
    return f"{low:.3f} {blocks} {high:.3f}"


def _mean_and_std(reward: MeanAndStd | None) -> str:
    return "-" if reward is None else f"{reward.mean:.4f} ± {reward.std:.4f}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
