"""Pretrain the embedded chat model on one CPU core; run again after a kill, and it goes on where it was.

python scripts/pretrain_chat.py --folder runs/pretrain-chat

To ship it, copy what it writes (all but pretraining.pt) into src/groupwise/workloads/chat/arithmetic/asset.
"""

from pathlib import Path

import torch
import tyro
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tools.arithmetic.pretrain import PretrainConfig, pretrain
from tools.arithmetic.pretrain import Progress as Told
from tools.arithmetic.tokenizer import train_tokenizer


def main(folder: Path, plan: PretrainConfig, threads: int = 1) -> None:
    """Train as planned and write the model, in bfloat16, and its tokenizer as transformers saves them.

    Args:
        folder: Where checkpoints and the model are written.
        plan: What the run depends on; a checkpoint of another plan is refused.
        threads: Of the processor, no more than there are free cores. Another number rounds differently.
    """
    torch.set_num_threads(threads)
    tokenizer = train_tokenizer()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.4f}"), TimeElapsedColumn())
    with Progress(TextColumn("pretrain"), *columns, TimeRemainingColumn(), TextColumn("left")) as progress:
        task = progress.add_task("pretrain", total=plan.steps, loss=float("nan"))

        def watch(told: Told) -> None:
            progress.update(task, completed=told.step, loss=told.loss)
            if not progress.console.is_terminal and told.step % 100 == 0:
                progress.console.print(f"step {told.step}/{plan.steps}  loss {told.loss:.4f}", highlight=False)

        model = pretrain(plan, tokenizer, folder, watch=watch)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    tyro.cli(main)
