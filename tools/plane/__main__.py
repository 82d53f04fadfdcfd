"""Pretrain the embedded flow model on the CPU; after a kill, the same command resumes.

    python -m tools.plane --folder runs/plane

To embed the result, copy config.json and model.safetensors into src/groupwise/workloads/flow/tasks/plane/asset.
"""

import time
from pathlib import Path

import torch
import tyro
from rich.console import Console

from groupwise.workloads.flow.tasks.plane.model import save_plane
from tools.plane.pretrain import PretrainConfig, pretrain


def main(folder: Path, config: PretrainConfig, checkpoint_every: int = 100, threads: int = 1) -> None:
    """Pretrain the embedded flow model and write its weights.

    Args:
        folder: Where checkpoints and the model are written.
        config: What the weights depend on; a checkpoint of another config is refused.
        checkpoint_every: Steps between checkpoints.
        threads: CPU threads. Another number changes the rounding.
    """
    torch.set_num_threads(threads)
    console = Console(soft_wrap=True, highlight=False)
    started = time.monotonic()
    save_plane(pretrain(config, folder, log=console.print, checkpoint_every=checkpoint_every), folder)
    console.print(f"{(time.monotonic() - started) / 60:.1f} minutes in this call; the model is in {folder}")


if __name__ == "__main__":
    tyro.cli(main)
