"""What is left of the sprite error: the scatter over noises, and the error that all noises of a condition share.

Clips of several noises are generated for each condition, before training, after it and by the upper bound. With d the
displacement of a sprite from where it should be, in pixels, and m its mean over the noises:

    scatter   root of the mean of |d - m|^2, with n - 1 in the denominator
    shared    root of the mean of |m|^2, less the part of it that is the scatter's: scatter^2 / n

both over conditions, frames and sprites that are in view.

    groupwise train flow
    python bench/flow_errors.py runs/flow
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import tyro
from jaxtyping import Float
from rich.console import Console
from rich.table import Table
from torch import Tensor

from groupwise.cli.eval import config_of_run
from groupwise.training.run_folder.checkpoint import restore
from groupwise.training.run_folder.folder import RunFolder
from groupwise.training.setup import set_up
from groupwise.workloads.checkpoint_files import newest_valid_checkpoint
from groupwise.workloads.flow.evaluate import generate_clips
from groupwise.workloads.flow.models.base import FlowModel
from groupwise.workloads.flow.sampling.encodings import ConditioningCache
from groupwise.workloads.flow.tasks.sprites.config import ASSET, SIDE
from groupwise.workloads.flow.tasks.sprites.model import SpritesModel, load_sprites
from groupwise.workloads.flow.tasks.sprites.pixels import halve, locate_sprites, sprite_shares
from groupwise.workloads.flow.tasks.sprites.scene import light_levels
from groupwise.workloads.flow.tasks.sprites.task import sprites_conditions
from groupwise.workloads.flow.workload import FlowWorkload

_FIRST = 8_000_000
"""Conditions that nothing else uses."""
_MIN_AREA = 6.0
"""Of a sprite that is in view, in pixels of the halved picture."""

Displacements = Float[Tensor, "noises conditions sprites frames 2"]


def main(run: tyro.conf.Positional[Path], conditions: int = 96, noises: int = 6) -> None:
    """Print the table.

    Args:
        run: Folder of a run of the recipe `flow`.
        conditions: Fresh conditions.
        noises: Clips of each.
    """
    workload = _trained(RunFolder(run))
    numbers = _FIRST + torch.arange(conditions)
    upper: FlowModel = SpritesModel(load_sprites(ASSET / "upper"))
    table = Table("pixels", "scatter over noises", "shared by all noises", "shared, first frame")
    models: dict[str, tuple[FlowModel | None, AbstractContextManager[None]]] = {
        "before": (None, workload.model.reference()),
        "after": (None, nullcontext()),
        "exact labels": (upper, nullcontext()),
    }
    for name, (model, weights) in models.items():
        with weights:
            found, in_view = _displacements(workload, numbers, noises, model)
        first = _shared(found[..., :1, :], in_view[..., :1])
        table.add_row(name, *(f"{value:.2f}" for value in (_scatter(found, in_view), _shared(found, in_view), first)))
    Console().print(table)


def _trained(folder: RunFolder) -> FlowWorkload:
    config = config_of_run(folder)[1]
    path = newest_valid_checkpoint(folder.checkpoints, print)
    assert path is not None, f"{folder.path} holds no checkpoint"
    setup = set_up(config, path, warn=print)
    restore(path, setup.state)
    assert isinstance(setup.workload, FlowWorkload)
    return setup.workload


def _displacements(
    workload: FlowWorkload, numbers: Tensor, noises: int, model: FlowModel | None
) -> tuple[Displacements, Float[Tensor, "conditions sprites frames"]]:
    """In pixels, and 1 where a sprite should be in view and is."""
    conditions = sprites_conditions(numbers)
    expected, area = (torch.stack([each.reward_columns[name] for each in conditions]) for name in ("centroid", "area"))
    light = light_levels([condition.prompt for condition in conditions])
    cache = ConditioningCache(workload.model, conditions, max_cached=len(conditions), encode_rows=16)
    found, in_view = [], (area > _MIN_AREA).float()
    for noise in range(noises):
        workload.config = replace(workload.config, eval_seed=noise)
        clips = generate_clips(workload, cache, torch.arange(len(conditions)), model=model)
        seen = locate_sprites(sprite_shares(halve(clips), light))
        found.append((seen.centroid - expected) * SIDE / 2)
        in_view *= (seen.area > _MIN_AREA).float()
    return torch.stack(found), in_view


def _scatter(found: Displacements, in_view: Tensor) -> float:
    return _mean(found.var(0).sum(-1), in_view) ** 0.5


def _shared(found: Displacements, in_view: Tensor) -> float:
    of_scatter = _scatter(found, in_view) ** 2 / len(found)
    return max(_mean(found.mean(0).square().sum(-1), in_view) - of_scatter, 0.0) ** 0.5


def _mean(values: Tensor, in_view: Tensor) -> float:
    return ((values * in_view).sum() / in_view.sum()).item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    tyro.cli(main)
