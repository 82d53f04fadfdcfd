"""What the embedded flow model gives without training: another path asked for, or the best of several clips.

    one scale    the requested path times a number, the best of several
    by light     such a number for each prompt
    components   numbers of their own for roll, pan and dolly, improved one after the other
    best of n    n clips of each condition, of which the reward itself picks one. It needs the true path and n times the
                 time, and is no method, but shows what the model's own clips contain.

The numbers are fitted by reward on training conditions, with noise that evaluation does not use, and all are
evaluated on the conditions of `groupwise eval`, between the base model and the upper bound.

    python bench/flow_baselines.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

from groupwise.recipes import load_recipe
from groupwise.workloads.flow.data.cameras import motion_to_pose
from groupwise.workloads.flow.evaluate import generate_clips
from groupwise.workloads.flow.models.base import FlowModel
from groupwise.workloads.flow.rewards import clip_rewards, weighted_sum
from groupwise.workloads.flow.sampling.encodings import ConditioningCache
from groupwise.workloads.flow.tasks.sprites.config import ASSET
from groupwise.workloads.flow.tasks.sprites.model import SpritesModel, load_sprites
from groupwise.workloads.flow.tasks.sprites.task import FIRST_FINAL, sprites_conditions, sprites_motions

_SCALES = (0.5, 0.7, 0.85, 1.0, 1.15, 1.3, 1.5, 1.8)
_FACTORS = (0.6, 0.8, 1.25, 1.6)
_COMPONENTS = {"roll": (2,), "pan": (3, 4), "dolly": (5,)}
_FIT_SEED = 1
_SHOWN = ("reward", "camera", "quality", "sprite error (px)", "floor", "PSNR (dB)")


class Conditions:
    """Some conditions of the task, whose paths can be asked for scaled. Clips are judged by the original paths."""

    def __init__(self, numbers: Tensor, model: Path | None = None):
        sizes = {"scenes": 8, "held_out_scenes": 1, "final_scenes": 1}
        self.workload = replace(load_recipe("flow").workload, **sizes, model=model).build(torch.device("cpu"))
        self.conditions, self.motions = sprites_conditions(numbers), sprites_motions(numbers)
        self.light = numbers % 3

    def metrics(self, scale: Tensor, *, noise_seed: int = 0, model: FlowModel | None = None) -> dict[str, Tensor]:
        """Of the clips that the model makes of motions x scale."""
        cameras = motion_to_pose(scale * self.motions)
        asked = [replace(each, camera=camera) for each, camera in zip(self.conditions, cameras, strict=True)]
        cache = ConditioningCache(self.workload.model, asked, max_cached=len(asked), encode_rows=16)
        self.workload.config = replace(self.workload.config, eval_seed=noise_seed)
        clips = generate_clips(self.workload, cache, torch.arange(len(asked)), model=model)
        task = self.workload.task
        terms = clip_rewards({**task.rewards, **task.eval_metrics}, self.conditions, clips)
        return {"reward": weighted_sum(terms, task.weights), **terms.per_rollout}

    def reward(self, scale: Tensor) -> Tensor:
        return self.metrics(scale, noise_seed=_FIT_SEED)["reward"]


def main(fit_conditions: int = 96, final_conditions: int = 480, best_of: int = 4, model: Path | None = None) -> None:
    """Print the fitted numbers and the table.

    Args:
        fit_conditions: Training conditions that the numbers are fitted on; 20 clips are generated for each.
        final_conditions: Conditions of `groupwise eval` that the result is measured on.
        best_of: Clips of each condition for `best of n`.
        model: Folder of another model than the embedded one.
    """
    console = Console(soft_wrap=True, highlight=False)
    fitted = _fit(Conditions(torch.arange(fit_conditions), model), console)
    final = Conditions(FIRST_FINAL + torch.arange(final_conditions), model)
    one, by_light, components = fitted
    rows = {
        "base": final.metrics(torch.ones(1)),
        "one scale": final.metrics(one),
        "by light": final.metrics(by_light[final.light].view(-1, 1, 1)),
        "components": final.metrics(components),
        "upper": final.metrics(torch.ones(1), model=SpritesModel(load_sprites(ASSET / "upper"))),
    }
    others = [final.metrics(torch.ones(1), noise_seed=2 + seed) for seed in range(best_of - 1)]
    rows[f"best of {best_of}"] = _best([rows["base"], *others])
    console.print(_table(rows))


def _fit(conditions: Conditions, console: Console) -> tuple[Tensor, Tensor, Tensor]:
    """The best scale, one for each light, and one for each component of a motion."""
    rewards = torch.stack([conditions.reward(torch.tensor(scale)) for scale in _SCALES])
    one = torch.tensor(_SCALES)[rewards.mean(1).argmax()]
    of_light = [rewards[:, conditions.light == light].mean(1) for light in range(3)]
    by_light = torch.tensor(_SCALES)[torch.stack(of_light).argmax(1)]
    best, components = rewards.mean(1).amax(), one.repeat(6)
    for columns in _COMPONENTS.values():
        for factor in _FACTORS:
            trial = components.clone()
            trial[list(columns)] = one * factor
            if (reward := conditions.reward(trial).mean()) > best:
                best, components = reward, trial
    by_scale = ", ".join(f"{scale} {reward:.4f}" for scale, reward in zip(_SCALES, rewards.mean(1), strict=True))
    console.print(f"reward by scale: {by_scale}")
    console.print(
        f"one scale {one:.2f}, by light {by_light.tolist()}, roll, pan, dolly {components[[2, 3, 5]].tolist()}"
    )
    return one, by_light, components


def _best(metrics: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Of the clip with the highest reward of each condition."""
    choice = torch.stack([each["reward"] for each in metrics]).argmax(0, keepdim=True)
    return {name: torch.stack([each[name] for each in metrics]).gather(0, choice)[0] for name in _SHOWN}


def _table(rows: Mapping[str, Mapping[str, Tensor]]) -> Table:
    base, upper = (rows[name]["reward"].mean() for name in ("base", "upper"))
    table = Table("", *_SHOWN, "share of the way", title=f"{len(rows['base']['reward'])} conditions")
    for name, metrics in rows.items():
        share = (metrics["reward"].mean() - base) / (upper - base)
        table.add_row(name, *(f"{metrics[metric].mean():.3f}" for metric in _SHOWN), f"{share:.1%}")
    return table


if __name__ == "__main__":
    torch.set_num_threads(1)
    tyro.cli(main)
