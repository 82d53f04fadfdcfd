"""`groupwise train RECIPE`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import mean
from typing import TYPE_CHECKING

from groupwise.cli.arguments import print_json, quiet_stdout, read_config
from groupwise.cli.tables import print_table
from groupwise.training.run_folder.folder import RunFolder, reward_of
from groupwise.workloads.base import ReportTable

if TYPE_CHECKING:
    from groupwise.training.run import MeanAndStd, RunSummary

_BLOCKS = "▁▂▃▄▅▆▇█"

DESCRIPTION = (
    "Train a recipe. The run folder holds config.json, metrics.jsonl (one object per step), samples.jsonl, eval.json"
    " and checkpoints/. Ctrl-C writes a checkpoint and exits; --resume continues, bit-identical to a run that never"
    " stopped."
)


def run(arguments: list[str], as_json: bool) -> int:
    config = read_config("train", arguments, DESCRIPTION)
    from groupwise.dist.comm import disconnect
    from groupwise.training.run import train

    with quiet_stdout(as_json):
        summary = train(config)
    disconnect()
    if summary.is_main and as_json:
        print_json({**asdict(summary), "run_dir": str(summary.run_dir)})
    elif summary.is_main:
        _show(summary)
    return 130 if summary.interrupted else 0


def _show(summary: RunSummary) -> None:
    reward_label = "reward, mean ± std of the first tenth -> last tenth of steps"
    rows = [[reward_label, _mean_and_std(summary.reward_first_tenth), _mean_and_std(summary.reward_last_tenth)]]
    rows += [
        [name, _number(summary.eval_before.get(name)), _number(after)] for name, after in summary.eval_after.items()
    ]
    title = f"{summary.run_dir}: {summary.steps} steps in {summary.seconds:.1f} s"
    rewards = [reward for entry in RunFolder(summary.run_dir).metrics() if (reward := reward_of(entry)) is not None]
    print_table(ReportTable(title, ["metric", "before", "after"], rows, f"reward by step  {sparkline(rewards)}"))


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """A line of blocks between the lowest and the highest value, each the mean of some consecutive steps."""
    count = min(width, len(values))
    bounds = [index * len(values) // count for index in range(count + 1)] if count else []
    means = [mean(values[start:end]) for start, end in pairwise(bounds)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    blocks = "".join(_BLOCKS[round((value - low) / (high - low or 1) * (len(_BLOCKS) - 1))] for value in means)
    return f"{low:.3f} {blocks} {high:.3f}"


def _mean_and_std(reward: MeanAndStd | None) -> str:
    return "-" if reward is None else f"{reward.mean:.4f} ± {reward.std:.4f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
