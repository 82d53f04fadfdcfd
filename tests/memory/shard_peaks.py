"""Bytes of one rank of several in real rollouts and updates of a chat policy, as torch's allocator shows them.

    python shard_peaks.py FOLDER RANKS [RANKS ...]      (writes FOLDER/bytes.json, by number of ranks, setting and part)

The other ranks are torch's fake ones, which send what this one does: so nothing but tensors is allocated, as with a
backend of an accelerator. All prompts are equally long and no completion ends early, as a plan assumes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tiny.chat
import tiny.llama
import torch
import torch.distributed as dist  # noqa: TID251 - the plan is compared with what torch itself does
from allocator import peak_allocated
from processes import free_port
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import groupwise as gw
from groupwise.core.advantage import compute_advantages
from groupwise.core.placement import place
from groupwise.core.reward import weigh
from groupwise.dist.sharding import local
from groupwise.training.rollout import Round, compute_rewards, generate_rollouts
from groupwise.training.setup import Setup, set_up
from groupwise.training.state import reserve_optimizer_memory
from groupwise.training.update import update
from groupwise.workloads.chat.config import ChatRewardsConfig, DataConfig, PolicyConfig, SamplingParams

SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 256}
PROMPT_TOKENS, COMPLETION_TOKENS = 24, 16
SETTINGS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "whole": {"shard": "full", "shard_rollout": "whole"},
    "blocks": {"shard": "full", "shard_rollout": "blocks"},
    "exchange per update": {"shard": "full", "shard_rollout": "blocks", "shard_exchange": "update"},
}


def sum_of_ids(prompts, completions, completion_ids, **columns) -> list[float]:
    """A reward that differs between members."""
    return [float(sum(ids)) for ids in completion_ids]


def config(folder: Path, **changes: Any) -> gw.Config:
    """Eight groups of four, in passes of one group."""
    if not (folder / "model").exists():
        tiny.llama.byte_tokenizer().save_pretrained(folder / "model")  # its token 256 ends a completion
        tiny.llama.llama(**SIZES).save_pretrained(folder / "model")
        rows = [{"prompt": [3 + (number + token) % 90 for token in range(PROMPT_TOKENS)]} for number in range(16)]
        tiny.chat.write_lines(folder / "train.jsonl", rows)
    workload = tiny.chat.chat_config(
        folder,
        policy=PolicyConfig(model=str(folder / "model")),
        data=DataConfig(train=str(folder / "train.jsonl"), max_prompt_tokens=PROMPT_TOKENS),
        sampling=SamplingParams(max_new_tokens=COMPLETION_TOKENS),
        rewards=ChatRewardsConfig(functions=("memory.shard_peaks:sum_of_ids",)),
        stop_tokens=("<end>",),
    )
    return gw.Config(workload, conditions_per_step=8, group_size=4, rows_per_pass=4, **changes)


def measure(config: gw.Config) -> dict[str, int]:
    """What stays, by part, and the peaks of both stages with it, in a second step."""
    setup = set_up(config)
    reserve_optimizer_memory(setup.state)
    _peaks(setup)
    gradients = _local_bytes(weight.grad for weight in setup.state.trainable if weight.grad is not None)
    moments = [value for fields in setup.state.optimizer.state.values() for value in fields.values()]
    held = {"weights": _local_bytes(setup.state.trainable), "optimizer": _local_bytes(moments)}
    rollout, in_update = _peaks(setup)
    total = sum(held.values())
    return {**held, "gradients": gradients, "rollout": total + rollout, "update": total + in_update}


def _peaks(setup: Setup) -> tuple[int, int]:
    """Of a rollout and of an update, besides what was held before."""
    placement, done = place(setup.shape, seed=0, step=0), list[gw.Rollouts]()
    setup.state.optimizer.zero_grad(set_to_none=True)
    in_rollout = peak_allocated(lambda: done.append(generate_rollouts(setup, placement)))
    rewards = weigh(compute_rewards(setup, done[0]), setup.config.reward)
    batch = Round(placement, done[0], setup.comm.gather(done[0].group_ids), rewards)
    advantages = compute_advantages(rewards, batch.group_ids, setup.config.advantage)
    return in_rollout, peak_allocated(lambda: update(setup, batch, advantages))


def _local_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor.detach()).nbytes for tensor in tensors)


def measure_on_ranks(folder: Path, ranks: int, port: int) -> dict[str, dict[str, int]]:
    launched = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in launched.items()}}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    measured = {name: measure(config(folder, **setting)) for name, setting in SETTINGS.items()}
    dist.destroy_process_group()
    return measured


if __name__ == "__main__":
    torch.set_num_threads(1)
    output, port = Path(sys.argv[1]), free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True)  # for the heartbeats of ranks
    by_ranks = {ranks: measure_on_ranks(output, ranks, port) for ranks in map(int, sys.argv[2:])}
    (output / "bytes.json").write_text(json.dumps(by_ranks))
    os._exit(0)
