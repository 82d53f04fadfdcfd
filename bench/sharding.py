"""Bytes of each rank and time of a step, replicated against sharded, on the CPU with gloo.

    python bench/sharding.py [--ranks 2 4] [--steps 3] [--width 512]

The model is the embedded chat task's with more and wider layers and random weights. Memory: one process per rank and
setting, tensors counted, and the growth of the process at its peak in two steps, with each large tensor mapped by
itself: a heap has holes, more or fewer in each run. Time: all settings in turn, in the same processes. Sharded rollouts
gather all weights first (whole), or block by block (blocks).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from groupwise.dist.comm import disconnect, exit_now
from groupwise.dist.sharding import local
from groupwise.recipes import load_recipe
from groupwise.training import setup as training_setup
from groupwise.training.config import Config
from groupwise.training.loop import train_step
from groupwise.training.setup import Setup

MIB = 2**20
EMBEDDED = Path(load_recipe("chat").workload.policy.folder_or_name)  # type: ignore[attr-defined]
SETTINGS: dict[str, dict[str, Any]] = {
    "replicated": {"shard": "none"},
    "whole": {"shard": "full", "shard_rollout": "whole"},
    "blocks": {"shard": "full", "shard_rollout": "blocks"},
}


def write_model(folder: Path, width: int) -> None:
    """The embedded model's tokenizer and architecture, larger."""
    shutil.copytree(EMBEDDED, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 8, "head_dim": 64}
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 64}
    config = transformers.AutoConfig.from_pretrained(folder, **sizes, **heads)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def share_of_digits(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
    """A reward that differs between the completions of random weights."""
    texts = [str(completion) for completion in completions]
    return [sum(letter.isdigit() for letter in text) / len(text) for text in texts]


def config_for(model: Path, setting: str) -> Config:
    config: Any = load_recipe("chat")
    policy = replace(config.workload.policy, model=str(model))
    sampling = replace(config.workload.sampling, max_new_tokens=16)
    rewards = replace(config.workload.rewards, functions=("sharding:share_of_digits",))
    workload = replace(config.workload, policy=policy, sampling=sampling, rewards=rewards)
    shape = {"conditions_per_step": 4, "group_size": 4, "rows_per_pass": 4}
    return replace(config, workload=workload, **SETTINGS[setting], **shape)


def held_bytes(setup: Setup) -> dict[str, int]:
    """Bytes of this rank's tensors after a step, by part."""
    weights = setup.state.trainable
    moments = [value for fields in setup.state.optimizer.state.values() for value in fields.values()]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    parts: dict[str, Sequence[Tensor]] = {"weights": weights, "gradients": gradients, "moments": moments}
    return {name: sum(local(tensor.detach()).nbytes for tensor in tensors) for name, tensors in parts.items()}


def measure_memory(model: Path, setting: str) -> dict[str, int]:
    """A step of a small model comes first, so that pages of libraries do not count."""
    training_setup.configure_process = torch.set_num_threads  # without keep_heap_memory
    return_freed_memory()
    train_step(training_setup.set_up(config_for(EMBEDDED, setting)))
    gc.collect()
    before = psutil.Process().memory_info().rss
    setup = training_setup.set_up(config_for(model, setting))
    return_freed_memory()
    for _ in range(2):
        train_step(setup)
    return {**held_bytes(setup), "process growth at peak": peak_rss() - before}


def return_freed_memory() -> None:
    """Map each large tensor by itself from now on, so that the process shrinks when one is freed; forget the peak."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peak_rss() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure_time(model: Path, steps: int) -> dict[str, Any]:
    setups = {setting: training_setup.set_up(config_for(model, setting)) for setting in SETTINGS}
    seconds: dict[str, list[float]] = {setting: [] for setting in setups}
    for _ in range(steps + 1):
        for setting, setup in setups.items():
            setup.comm.barrier()
            start = time.perf_counter()
            train_step(setup)
            setup.comm.barrier()
            seconds[setting].append(time.perf_counter() - start)
    ratios = {
        setting: statistics.median(
            taken / alone for alone, taken in zip(seconds["replicated"][1:], values[1:], strict=True)
        )
        for setting, values in seconds.items()
    }
    return {"seconds": {setting: values[1:] for setting, values in seconds.items()}, "ratios": ratios}


def run_rank(rank: int, ranks: int, port: int, model: Path, task: str, steps: int, output: Path) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}
    outcome = measure_time(model, steps) if task == "time" else measure_memory(model, task)
    if rank == 0:
        output.write_text(json.dumps(outcome))
    disconnect()
    exit_now()


def start(ranks: int, model: Path, task: str, steps: int) -> Any:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    output = model.parent / f"{task}-{ranks}.json"
    start_processes(run_rank, (ranks, port, model, task, steps, output), nprocs=ranks, start_method="fork")
    return json.loads(output.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())  # not one that exiting ranks remove
    try:
        measure(folder / "model", options)
    finally:
        shutil.rmtree(folder)


def measure(model: Path, options: argparse.Namespace) -> None:
    write_model(model, options.width)
    for ranks in options.ranks:
        for setting in SETTINGS:
            parts = start(ranks, model, setting, options.steps)
            shown = ", ".join(f"{name} {num_bytes / MIB:.1f} MiB" for name, num_bytes in parts.items())
            print(f"{ranks} ranks, {setting}: {shown}", flush=True)
    timed = start(2, model, "time", options.steps)
    for setting, ratio in timed["ratios"].items():
        print(f"2 ranks, {setting}: {ratio:.2f} of a replicated step {timed['seconds'][setting]}", flush=True)


if __name__ == "__main__":
    main()
