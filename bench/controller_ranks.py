"""A controller's training on 1 and on 2 processes of one thread each: the same steps, nothing cached beforehand.

Every step draws other conditions, so answers and hidden states are computed, not read from a cache. Rounds alternate
between the two, and the ratio is the median over rounds; start-up, preflight and evaluation are left out.

python bench/controller_ranks.py --steps 4 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from processes import on_ranks

BAR = 1.7


def worker(output: Path, steps: int, placement: str) -> None:
    """What each process runs: the steps after a warm-up one, timed together."""
    from groupwise.dist.comm import connect, disconnect
    from groupwise.recipes import load_recipe
    from groupwise.training.loop import training_steps
    from groupwise.training.run import set_up

    recipe = load_recipe("controller")
    # Other questions than the shipped ones: none of their answers is precomputed.
    cold = replace(recipe.workload, question_seed=1, estimator="proportional")
    config = replace(recipe, workload=cold, steps=steps + 1, placement=placement)
    setup = set_up(config)
    taken = training_steps(setup)
    rewards = [next(taken).metrics["reward"]]
    setup.comm.barrier()
    started, started_cpu = time.perf_counter(), time.process_time()
    rewards += [step.metrics["reward"] for step in taken]
    busiest = setup.comm.max(time.process_time() - started_cpu)[0]
    setup.comm.barrier()
    seconds = time.perf_counter() - started
    if connect().is_main:
        output.write_text(json.dumps({"seconds": seconds, "busiest": busiest, "rewards": rewards}))
    disconnect()


def timed(ranks: int, steps: int, placement: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "times.json"
        arguments = [__file__, "--worker", output, "--steps", steps, "--placement", placement]
        process = on_ranks(ranks, arguments, seconds=1800)
        if process.returncode:
            sys.exit(process.stderr)
        return json.loads(output.read_text())


def main(steps: int, rounds: int, placement: str) -> None:
    runs_by_ranks = {ranks: [] for ranks in (1, 2)}
    for _ in range(rounds):
        for ranks, runs in runs_by_ranks.items():
            runs.append(timed(ranks, steps, placement))
    clock, busiest = (
        {ranks: statistics.median(run[name] for run in runs) for ranks, runs in runs_by_ranks.items()}
        for name in ("seconds", "busiest")
    )
    pairs = list(zip(runs_by_ranks[1], runs_by_ranks[2], strict=True))
    ratio = statistics.median(one["seconds"] / two["seconds"] for one, two in pairs)
    share = statistics.median(one["busiest"] / two["busiest"] for one, two in pairs)
    rewards = [run["rewards"] for runs in runs_by_ranks.values() for run in runs]
    same = max(abs(a - b) for other in rewards for a, b in zip(rewards[0], other, strict=True))
    print(
        f"controller, {steps} steps of 32 conditions x 8 members, placement {placement}, one thread a process, measured"
    )
    for ranks in runs_by_ranks:
        name = f"{ranks} process{'es' * (ranks > 1)}"
        print(
            f"  {name:<12} {clock[ranks]:7.2f} s, busiest process {busiest[ranks]:7.2f} s of CPU (medians of {rounds})"
        )
    print(f"  ratio {ratio:.2f} by the clock (bar {BAR}), {share:.2f} by CPU time, which other programs disturb less")
    print(f"  rewards of all runs differ by at most {same:.1g}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--placement", default="whole", choices=["whole", "spread", "shuffled"])
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker, given.steps, given.placement)
    else:
        main(given.steps, given.rounds, given.placement)
