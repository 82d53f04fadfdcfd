"""Pretrain the embedded chat model on one CPU core. Run the same command again after a kill to continue.

python -m tools.arithmetic --folder runs/pretrain-chat

To ship the result, copy all files but pretraining.pt to src/groupwise/workloads/chat/tasks/arithmetic/asset.
"""

from pathlib import Path

import torch
import tyro
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tools.arithmetic.pretrain import PretrainConfig, pretrain
from tools.arithmetic.tokenizer import train_tokenizer


def main(folder: Path, config: PretrainConfig, threads: int = 1) -> None:
    """Train the model and write it, in bfloat16, with its tokenizer as transformers saves them.

    Args:
        folder: Where checkpoints and the model are written.
        config: Settings of the run; a checkpoint of other settings is refused.
        threads: CPU threads, no more than there are free cores. Another number rounds differently.
    """
    torch.set_num_threads(threads)
    tokenizer = train_tokenizer()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.4f}"), TimeElapsedColumn())
    with Progress(TextColumn("pretrain"), *columns, TimeRemainingColumn(), TextColumn("left")) as progress:
        task = progress.add_task("pretrain", total=config.steps, loss=float("nan"))

        def show(step: int, loss: float) -> None:
            progress.update(task, completed=step, loss=loss)
            if not progress.console.is_terminal and step % 100 == 0:
                progress.console.print(f"step {step}/{config.steps}  loss {loss:.4f}", highlight=False)

        model = pretrain(config, tokenizer, folder, on_step=show)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    tyro.cli(main)
