"""Where a step's CPU time goes on one thread, for rollout and update, against the rate of large matrix products.

python bench/chat_profile.py            1 M parameters, prompt 256, 64 new, 16 x 2
python bench/chat_profile.py --width 512 --layers 8
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from chat_sides import Case, EvenTokens
from torch.profiler import ProfilerActivity, profile

import groupwise as gw
from groupwise.core.placement import place

PRODUCTS = "matrix products"
OPERATORS = {
    PRODUCTS: ("aten::mm", "aten::addmm", "aten::bmm", "aten::addmm_"),
    "attention": (
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "softmax and sampling": ("aten::exp_", "aten::amax", "aten::cumsum", "aten::searchsorted", "aten::linalg_vecdot"),
    "copies and indexing": ("aten::copy_", "aten::cat", "aten::index", "aten::index_put_", "aten::fill_"),
}


def gemm_rate() -> float:
    """Floating point operations a CPU second in products of 1024 x 1024 matrices."""
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    spent = []
    for _ in range(7):
        begun = time.process_time()
        torch.mm(left, right)
        spent.append(time.process_time() - begun)
    return 2 * 1024**3 / min(spent)


def print_profile(act: Callable[[], object], rate: float) -> None:
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as profiled:
        begun, wall = time.process_time(), time.perf_counter()
        act()
        spent, whole = time.process_time() - begun, time.perf_counter() - wall
    events = profiled.key_averages()
    by_name = {event.key: event.self_cpu_time_total / 1e6 / whole for event in events if event.key.startswith("aten::")}
    flops = sum(event.flops for event in events if event.key in OPERATORS[PRODUCTS])
    kinds = {kind: sum(by_name.get(name, 0.0) for name in names) for kind, names in OPERATORS.items()}
    kinds["other operators"] = sum(by_name.values()) - sum(kinds.values())
    kinds["Python between them"] = 1 - sum(by_name.values())
    print(f"  {spent:.2f} CPU seconds, {flops / 1e9:.1f} GFLOP in products: {flops / rate:.2f} s at the GEMM rate")
    for kind, share in kinds.items():
        print(f"    {kind:<22} {100 * share:5.1f} %")


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("prompt", 256),
        ("new", 64),
        ("group", 16),
        ("width", 128),
        ("layers", 4),
        ("vocabulary", 512),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    case = Case("profile", **vars(parser.parse_args()))
    workload = EvenTokens(case, 0)
    config = gw.Config(gw.WorkloadConfig(), conditions_per_step=2, group_size=case.group, rows_per_pass=case.rows)
    rows = place(config.shape(conditions=workload.num_conditions), seed=0, step=0).rows_of(0)
    rollouts = workload.rollout(rows)

    def update() -> None:
        workload.score(rollouts).logp.sum().backward()

    update()
    rate = gemm_rate()
    weights = sum(weight.numel() for weight in workload.policy.parameters())
    print(f"{weights:,} parameters; large products run at {rate / 1e9:.0f} GFLOP/s")
    for name, act in (("rollout", lambda: workload.rollout(rows)), ("score and backward", update)):
        print(name)
        print_profile(act, rate)


if __name__ == "__main__":
    main()
