"""Whole GRPO steps (rollout, reward, update) against TRL's GRPOTrainer: the same tiny Llama, prompts, reward, tokens.

One process, one thread, interleaved steps, CPU seconds. TRL runs with several micro-batch sizes and the best one
counts.

pip install -e '.[chat,bench]'
python bench/chat.py                     speeds of all cases
python bench/chat.py --case vocabulary   one of them
python bench/chat.py --memory            peak memory, each side in its own process
python bench/chat.py --learn --steps 120 reward after equally many steps and samples, 3 seeds
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys

import torch
from chat_sides import Case, StepResult, groupwise_steps, run_trl

CASES = {
    "short": Case("1 M parameters, prompt 32, 64 new, 8 x 2", prompt=32, new=64, group=8),
    "long": Case("1 M parameters, prompt 256, 64 new, 16 x 2", prompt=256, new=64, group=16),
    "large": Case("25 M parameters, prompt 256, 64 new, 16 x 2", prompt=256, new=64, group=16, width=512, layers=8),
    "ragged": Case(
        "25 M parameters, prompt 256, 1 to 192 new, 16 x 2", 256, 192, 16, width=512, layers=8, stop_probability=1 / 40
    ),
    "vocabulary": Case("vocabulary 32,768, prompt 256, 64 new, 16 x 2", prompt=256, new=64, group=16, vocabulary=32768),
}
REQUIRED_RATIO = {"short": 1.5, "long": 3.5, "large": 4.0, "ragged": 7.0, "vocabulary": 8.0}


def rate(steps: list[StepResult]) -> float:
    """Completion tokens a second over all steps after the first, which warms up."""
    return sum(step.tokens for step in steps[1:]) / sum(step.seconds for step in steps[1:])


def compare(name: str, steps: int, micro_batch: int | None) -> None:
    case = CASES[name]
    micro_batches = [micro_batch] if micro_batch else [size for size in (8, 16, 32) if case.rows % size == 0]
    ours = groupwise_steps(case, 1000)
    results: dict[int, tuple[list[StepResult], list[StepResult]]] = {}
    for size in micro_batches:
        mine: list[StepResult] = []
        theirs = run_trl(case, steps, size, between=lambda mine=mine: mine.append(next(ours)))
        results[size] = (mine, theirs)
    print(f"{case.name}: completion tokens a second, {steps - 1} interleaved steps")
    best = max(micro_batches, key=lambda size: rate(results[size][1]))
    for size, (mine, theirs) in results.items():
        ratios = [a.tokens / a.seconds / (b.tokens / b.seconds) for a, b in zip(mine[1:], theirs[1:], strict=True)]
        print(
            f"  TRL with {size:2d} rows a pass {rate(theirs):8.0f}   groupwise {rate(mine):8.0f}   ratio"
            f" {rate(mine) / rate(theirs):5.2f} (of single steps {min(ratios):.2f} to {max(ratios):.2f})"
            + (f"   <- TRL's best; required {REQUIRED_RATIO[name]}" if size == best else "")
        )
        sys.stdout.flush()


def peak_of(side: str, case: Case, micro_batch: int) -> None:
    """Print how much the peak memory of this process grows in two steps, after a step of a tiny model that loads all
    libraries.
    """

    def run(case: Case, steps: int, rows: int) -> int:
        if side == "trl":
            run_trl(case, steps, rows)
        else:
            list(groupwise_steps(case, steps))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = run(Case("tiny", prompt=4, new=8, group=4, width=32, layers=1), 1, 8)
    print(1024 * (run(case, 2, micro_batch) - before))


def memory(name: str, micro_batch: int | None) -> None:
    case = CASES[name]
    peaks: dict[str, int] = {}
    sizes = (micro_batch,) if micro_batch else (32, 16, 8)
    for side, rows in (("groupwise", case.rows), *(("trl", size) for size in sizes)):
        command = [sys.executable, __file__, "--case", name, "--peak-of", side, "--micro-batch", str(rows)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        peaks[f"{side}, {rows} rows a pass"] = int(output.split()[-1])
    print(f"{case.name}: peak memory of two steps above that of a tiny model, each side in its own process")
    ours = next(iter(peaks.values()))
    for side, peak in peaks.items():
        print(f"  {side:<28} {peak / 2**20:8.0f} MiB   groupwise / this {ours / peak:5.2f}")


def learn(steps: int) -> None:
    case = CASES["short"]
    print(f"{case.name}: mean reward of the last 10 of {steps} steps, learning rate 3e-4")
    for seed in range(3):
        mine = [step.reward for step in groupwise_steps(case, steps, rate=3e-4, seed=seed)]
        theirs = [step.reward for step in run_trl(case, steps, 16, rate=3e-4, seed=seed)]
        ends = (statistics.mean(rewards[-10:]) for rewards in (mine, theirs))
        print(
            "  seed {}: groupwise {:.3f}, TRL {:.3f} (first step {:.3f} and {:.3f})".format(
                seed, *ends, mine[0], theirs[0]
            )
        )


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--learn", action="store_true")
    parser.add_argument("--peak-of", choices=("groupwise", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--micro-batch", type=int, help="of TRL; all that divide the step by default")
    arguments = parser.parse_args()
    if arguments.peak_of:
        peak_of(arguments.peak_of, CASES[arguments.case], arguments.micro_batch)
    elif arguments.memory:
        memory(arguments.case or "vocabulary", arguments.micro_batch)
    elif arguments.learn:
        learn(arguments.steps)
    else:
        for name in [arguments.case] if arguments.case else CASES:
            compare(name, arguments.steps, arguments.micro_batch)


if __name__ == "__main__":
    main()
