"""Pretrain the embedded mosaic model on the CPU; run again after a kill, and it goes on where it was.

python scripts/pretrain_mosaic.py --folder runs/mosaic

To ship it, copy config.json, generation_config.json and model.safetensors into the package's asset folder, then run
scripts/score_mosaic.py importance, scripts/remember_mosaic.py and scripts/score_mosaic.py card.
"""

import time
from pathlib import Path

import torch
import tyro
from rich.console import Console

from tools.mosaic.curriculum import PretrainConfig
from tools.mosaic.pretrain import pretrain


def main(
    folder: Path, plan: PretrainConfig, compiled: bool = True, checkpoint_every: int = 50, threads: int = 2
) -> None:
    """Train as planned and write the model, in bfloat16, as transformers saves it.

    Args:
        folder: Where checkpoints and the model are written.
        plan: What the run depends on; a checkpoint of another plan is refused.
        compiled: Compile the training pass; needs a C++ compiler.
        checkpoint_every: Steps between checkpoints.
        threads: Of the processor, no more than there are free cores. Another number rounds differently.
    """
    torch.set_num_threads(threads)
    console = Console(soft_wrap=True, highlight=False)
    started = time.monotonic()
    learner = pretrain(plan, folder, say=console.print, compiled=compiled, checkpoint_every=checkpoint_every)
    learner.model.to(torch.bfloat16).save_pretrained(folder)
    console.print(f"{(time.monotonic() - started) / 60:.1f} minutes in this call; the model is in {folder}")


if __name__ == "__main__":
    tyro.cli(main)
