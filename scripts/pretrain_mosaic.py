"""Pretrain the embedded mosaic model on one CPU thread; run again after a kill, and it goes on where it was.

python scripts/pretrain_mosaic.py --folder runs/mosaic
python scripts/score_mosaic.py --folder runs/mosaic
"""

import time
from pathlib import Path

import torch
import tyro
from rich.console import Console

from groupwise.workloads.controller.mosaic.pretrain.plan import Plan
from groupwise.workloads.controller.mosaic.pretrain.run import pretrain


def main(folder: Path, plan: Plan, compiled: bool = True, checkpoint_every: int = 50) -> None:
    """Train as planned and write the model, in bfloat16, as transformers saves it.

    Args:
        folder: Where checkpoints and the model are written.
        plan: What the run depends on; a checkpoint of another plan is refused.
        compiled: Compile the training pass; needs a C++ compiler.
        checkpoint_every: Steps between checkpoints.
    """
    torch.set_num_threads(1)
    console = Console(soft_wrap=True, highlight=False)
    started = time.monotonic()
    learner = pretrain(plan, folder, say=console.print, compiled=compiled, checkpoint_every=checkpoint_every)
    learner.model.to(torch.bfloat16).save_pretrained(folder)
    console.print(f"{(time.monotonic() - started) / 60:.1f} minutes in this call; the model is in {folder}")


if __name__ == "__main__":
    tyro.cli(main)
