"""Say what the embedded chat model can do on held-out questions, by the style of its answers: the table of its card.

python scripts/score_chat.py
"""

from dataclasses import replace

import torch
import tyro
from rich.console import Console
from torch import Tensor

from groupwise.recipes import load_recipe
from groupwise.workloads.chat.evaluate import Exam, sit
from groupwise.workloads.chat.workload import ChatWorkload


def main(questions: int = 512, samples: int = 4) -> None:
    """Complete held-out questions as sampled at temperature 1 and greedily.

    Args:
        questions: How many, of 512.
        samples: Completions of each question when sampled.
    """
    torch.set_num_threads(1)
    config = load_recipe("chat").workload
    workload = replace(config, eval=replace(config.eval, questions=questions)).build(torch.device("cpu"))
    say = Console(soft_wrap=True, highlight=False).print
    say("| | exact match | worked out | right when worked out | right at once |\n|---|---|---|---|---|")
    with torch.no_grad():
        for name, exam in (
            (f"sampled, {samples} times", sit(workload, workload.parts.held_out, samples=samples)),
            ("greedy", sit(workload, workload.parts.held_out, samples=1, greedy=True)),
        ):
            say(f"| {name} | " + " | ".join(f"{share:.1%}" for share in shares(workload, exam)) + " |")


def shares(workload: ChatWorkload, exam: Exam) -> list[float]:
    right = exam.passed.flatten()
    worked = torch.tensor(["=" in text for text in workload.texts(exam.completions)])
    return [mean(right), mean(worked), mean(right[worked]), mean(right[~worked])]


def mean(flags: Tensor) -> float:
    return flags.double().mean().item()


if __name__ == "__main__":
    tyro.cli(main)
