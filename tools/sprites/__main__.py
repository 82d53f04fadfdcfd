"""Pretrain the embedded flow model and its upper bound on the CPU; after a kill, the same command resumes.

    python -m tools.sprites --folder runs/sprites

To embed the result, copy the folders runs/sprites/asset/base and .../upper into
src/groupwise/workloads/flow/tasks/sprites/asset.
"""

import time
from pathlib import Path

import torch
import tyro
from rich.console import Console

from groupwise.workloads.flow.models.small_folder import save_transformer
from tools.sprites.pretrain import PretrainConfig, pretrain


def main(folder: Path, config: PretrainConfig, checkpoint_every: int = 100, threads: int = 1) -> None:
    """Pretrain both models and write their weights.

    Args:
        folder: Where checkpoints and models are written.
        config: What the weights depend on; a checkpoint of another config is refused.
        checkpoint_every: Steps between checkpoints.
        threads: CPU threads. Another number changes the rounding.
    """
    torch.set_num_threads(threads)
    console = Console(soft_wrap=True, highlight=False)
    started = time.monotonic()
    for stage in ("shared", "base", "upper"):
        model = pretrain(config, folder, stage, log=console.print, checkpoint_every=checkpoint_every)
        if stage != "shared":
            save_transformer(model, folder / "asset" / stage)
        minutes = (time.monotonic() - started) / 60
        console.print(f"{stage}: {minutes:.1f} minutes, {time.process_time() / 60:.1f} of CPU time, since the start")


if __name__ == "__main__":
    tyro.cli(main)
