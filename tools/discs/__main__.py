"""Pretrain the embedded image model on the CPU; after a kill, the same command resumes.

    python -m tools.discs --folder runs/discs

To embed the result, copy the folder runs/discs/asset to src/groupwise/workloads/flow/tasks/discs/asset.
"""

import time
from pathlib import Path

import torch
import tyro
from rich.console import Console

from groupwise.workloads.flow.models.small_folder import save_transformer
from tools.discs.pretrain import PretrainConfig, pretrain


def main(folder: Path, config: PretrainConfig, checkpoint_every: int = 200, threads: int = 1) -> None:
    """Pretrain and write the weights.

    Args:
        folder: Where checkpoints and the model are written.
        config: What the weights depend on; a checkpoint of another config is refused.
        checkpoint_every: Steps between checkpoints.
        threads: CPU threads. Another number changes the rounding.
    """
    torch.set_num_threads(threads)
    console = Console(soft_wrap=True, highlight=False)
    started = time.monotonic()
    save_transformer(pretrain(config, folder, log=console.print, checkpoint_every=checkpoint_every), folder / "asset")
    minutes = (time.monotonic() - started) / 60
    console.print(f"{minutes:.1f} minutes, {time.process_time() / 60:.1f} of CPU time, since the start")


if __name__ == "__main__":
    tyro.cli(main)
