"""Planned, traced and true memory of a rollout or an update, over models and settings; and what others estimate.

    python bench/memory.py [NAME ...]          # all points, or those named; --json for one object a line

*plan* is the arithmetic (no torch), *trace* follows a pass and AdamW's step, or a rollout, with fake tensors, *truth*
is what the CPU allocator handed out in the same with real tensors (torch.profiler, profile_memory). Models that would
not fit here have no truth.

'accelerate' is what its `estimate-memory` gives for training with Adam, by its own function. 'DeepSpeed' is what its
estimator for ZeRO 2 without offload gives on one GPU, by its own function where deepspeed is installed (the extra
`bench`). Both take all parameters as trained and leave activations out.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from memory_points import POINTS, Point
from torch.profiler import ProfilerActivity, profile

from groupwise.core.units import format_bytes
from groupwise.training.config import OptimizerConfig
from groupwise.training.state import create_state


def allocated(act: Callable[[], object]) -> int:
    """What the allocator hands out at most while `act` runs."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        kept = act()
    del kept
    found = watched.profiler.kineto_results.events()
    events = sorted((event.start_ns(), event.nbytes()) for event in found if event.name() == "[memory]")
    now = peak = 0
    for _, size in events:
        now += size
        peak = max(peak, now)
    return peak


def true_bytes(point: Point) -> int:
    """Weights, buffers and AdamW's moments, and what the allocator handed out besides."""
    made = point.made(fake=False)
    trained = [weight for weight in made.policy.parameters() if weight.requires_grad]
    held = (*made.policy.parameters(), *made.policy.buffers(), *made.more)
    before = sum(tensor.nbytes for tensor in held) + 2 * sum(weight.nbytes for weight in trained)
    if point.stage == "rollout":
        with torch.no_grad():
            return before + allocated(made.rollout)
    optimizer = create_state(made.policy, OptimizerConfig()).optimizer

    def step() -> None:
        for _ in range(2):
            made.one_pass().backward()
        optimizer.step()

    step()
    optimizer.zero_grad(set_to_none=True)
    return before + allocated(step)


def of_accelerate(numbers: int) -> int:
    from accelerate.commands.estimate import estimate_training_usage  # noqa: TID251 - its arithmetic alone

    return int(estimate_training_usage(4 * numbers, "float32")["step"])


def of_deepspeed(numbers: int) -> int | None:
    try:
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
    except ImportError:
        return None
    _, on_device = estimate_zero2_model_states_mem_needs(numbers, 1, 1, False, 1.5)
    return int(on_device)


def metrics(name: str, point: Point) -> dict[str, Any]:
    begun = time.perf_counter()
    planned = sum(getattr(point.planned().stages(point.job()), point.stage).values())
    milliseconds = 1000 * (time.perf_counter() - begun)
    begun = time.process_time()
    made = point.made(fake=True)
    numbers = sum(weight.numel() for weight in {*made.policy.parameters(), *made.frozen})
    traced = made.traced(point.stage, point.job())
    seconds = time.process_time() - begun
    return {
        "name": f"{name}: {point.stage}",
        "plan": planned,
        "trace": traced,
        "truth": true_bytes(point) if point.true else None,
        "accelerate": of_accelerate(numbers),
        "deepspeed": of_deepspeed(numbers),
        "plan_ms": milliseconds,
        "trace_s": seconds,
    }


def shown(found: dict[str, Any]) -> str:
    truth, trace = found["truth"], found["trace"]
    beside = f"{format_bytes(truth)} | {trace / truth - 1:+.1%}" if truth else "- | -"
    plan = f"{format_bytes(found['plan'])} | {found['plan'] / trace - 1:+.1%}"
    others = " | ".join(
        f"{found[name] / trace - 1:+.0%}" if found[name] else "-" for name in ("accelerate", "deepspeed")
    )
    return f"| {found['name']} | {beside} | {format_bytes(trace)} | {plan} | {others} | {found['trace_s']:.0f} s |"


def main() -> None:
    torch.set_num_threads(1)
    words = [word for word in sys.argv[1:] if word != "--json"]
    print("| of | truth | trace off by | trace | plan | plan off by | accelerate | DeepSpeed | trace took |")
    for name, point in POINTS.items():
        if not words or name in words:
            found = metrics(name, point)
            print(json.dumps(found) if "--json" in sys.argv else shown(found), flush=True)


if __name__ == "__main__":
    main()
