"""Planned, traced and true memory of a rollout or an update, over models and settings; and what others estimate.

    python bench/memory.py [NAME ...]          # all points, or those named; --json for one object a line

*plan* is the arithmetic (no torch), *trace* runs a pass and AdamW's step, or a rollout, with fake tensors, *truth* is
what the CPU allocator handed out for the same with real tensors (torch.profiler, profile_memory). Models that do not
fit into this machine have no truth.

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
from groupwise.memory.trace import trace_rollout, trace_update
from groupwise.training.config import OptimizerConfig
from groupwise.training.state import create_state


def peak_allocated(function: Callable[[], object]) -> int:
    """Peak bytes that the allocator hands out while `function` runs."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = function()
    del result
    events = profiled.profiler.kineto_results.events()
    sizes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    current = peak = 0
    for _, size in sizes:
        current += size
        peak = max(peak, current)
    return peak


def true_bytes(point: Point) -> int:
    """Weights, buffers and AdamW's moments, and what the allocator handed out besides."""
    step = point.step(fake=False)
    held = (*step.policy.parameters(), *step.policy.buffers(), *step.held)
    before = sum(tensor.nbytes for tensor in held) + 2 * sum(weight.nbytes for weight in step.trained)
    if point.stage == "rollout":
        with torch.no_grad():
            return before + peak_allocated(lambda: point.real_rollout(step))
    before += sum(tensor.nbytes for tensor in step.held_in_update)
    optimizer = create_state(step.policy, OptimizerConfig()).optimizer

    def update() -> None:
        for _ in range(2):
            step.update_pass().backward()
        optimizer.step()

    update()
    optimizer.zero_grad(set_to_none=True)
    return before + peak_allocated(update)


def accelerate_estimate(parameters: int) -> int:
    from accelerate.commands.estimate import estimate_training_usage  # noqa: TID251 - its arithmetic alone

    return int(estimate_training_usage(4 * parameters, "float32")["step"])


def deepspeed_estimate(parameters: int) -> int | None:
    try:
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
    except ImportError:
        return None
    _, on_device = estimate_zero2_model_states_mem_needs(parameters, 1, 1, False, 1.5)
    return int(on_device)


def metrics(name: str, point: Point) -> dict[str, Any]:
    started = time.perf_counter()
    planned = sum(point.memory_model().predict(point.spec()).to_dict()[point.stage].values())
    plan_ms = 1000 * (time.perf_counter() - started)
    started = time.process_time()
    step = point.step(fake=True)
    traced = trace_rollout(step) if point.stage == "rollout" else trace_update(step, point.spec())
    trace_s = time.process_time() - started
    parameters = point.parameters(step)
    return {
        "name": f"{name}: {point.stage}",
        "plan": planned,
        "trace": traced,
        "truth": true_bytes(point) if point.true else None,
        "accelerate": accelerate_estimate(parameters),
        "deepspeed": deepspeed_estimate(parameters),
        "plan_ms": plan_ms,
        "trace_s": trace_s,
    }


def table_row(result: dict[str, Any]) -> str:
    truth, trace = result["truth"], result["trace"]
    beside = f"{format_bytes(truth)} | {trace / truth - 1:+.1%}" if truth else "- | -"
    plan = f"{format_bytes(result['plan'])} | {result['plan'] / trace - 1:+.1%}"
    others = " | ".join(
        f"{result[name] / trace - 1:+.0%}" if result[name] else "-" for name in ("accelerate", "deepspeed")
    )
    return f"| {result['name']} | {beside} | {format_bytes(trace)} | {plan} | {others} | {result['trace_s']:.0f} s |"


def main() -> None:
    torch.set_num_threads(1)
    names = [argument for argument in sys.argv[1:] if argument != "--json"]
    print("| of | truth | trace off by | trace | plan | plan off by | accelerate | DeepSpeed | trace took |")
    for name, point in POINTS.items():
        if not names or name in names:
            result = metrics(name, point)
            print(json.dumps(result) if "--json" in sys.argv else table_row(result), flush=True)


if __name__ == "__main__":
    main()
