"""Pretrain the embedded flow model on the CPU; run again after a kill, and it goes on where it was.

python scripts/pretrain_flow.py --folder runs/plane

To ship it, copy config.json and model.safetensors into the package's asset folder (src/groupwise/workloads/flow/plane).
"""

import time
from pathlib import Path

import torch
import tyro
from rich.console import Console

from groupwise.workloads.flow.tasks.plane.model import save_plane
from tools.plane.pretrain import PretrainConfig, pretrain


def main(folder: Path, plan: PretrainConfig, checkpoint_every: int = 100, threads: int = 1) -> None:
    """Train as planned and write the weights.

    Args:
        folder: Where checkpoints and the model are written.
        plan: What the run depends on; a checkpoint of another plan is refused.
        checkpoint_every: Steps between checkpoints.
        threads: Of the processor. Another number rounds differently.
    """
    torch.set_num_threads(threads)
    console = Console(soft_wrap=True, highlight=False)
    started = time.monotonic()
    save_plane(pretrain(plan, folder, say=console.print, checkpoint_every=checkpoint_every), folder)
    console.print(f"{(time.monotonic() - started) / 60:.1f} minutes in this call; the model is in {folder}")


if __name__ == "__main__":
    tyro.cli(main)
