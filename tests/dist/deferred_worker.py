"""Builds policies with their weights left in files until they are sharded, and loaded whole before; rank 0 compares.

python deferred_worker.py FOLDER RANKS [RANKS ...]      (writes FOLDER/RANKS.json: case to names of what differs)
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tiny.chat
import torch
from diffusers import WanTransformer3DModel
from processes import free_port
from tiny.pipelines import config_of, save_pipeline
from tiny.wan import LORA
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

import groupwise as gw
from groupwise.dist.comm import Comm, connect, disconnect, exit_now
from groupwise.dist.deferred_weights import deferring_weights, is_deferred
from groupwise.dist.sharding import full, reshard, rollout_weights
from groupwise.recipes import load_recipe
from groupwise.training.setup import _shard
from groupwise.workloads.base import WorkloadConfig
from groupwise.workloads.chat.config import PolicyConfig
from groupwise.workloads.flow.config import TrainedPartsConfig
from groupwise.workloads.flow.models.camera_layers import add_camera_layers
from groupwise.workloads.flow.models.checkpoints import load_camera_layers, original_state
from groupwise.workloads.flow.models.pipeline_folder import load_transformer
from groupwise.workloads.flow.models.trained_parts import select_trained_parameters


@dataclass(frozen=True)
class CameraConfig(WorkloadConfig):
    """A transformer with camera layers, all of them from a file of their own."""

    folder: Path
    part: str

    def build(self, device: torch.device) -> Any:
        policy = load_transformer(WanTransformer3DModel, self.folder / "pipeline", "float32", device)
        add_camera_layers(policy)
        load_camera_layers(policy, self.folder / "recam.ckpt")
        reference = select_trained_parameters(policy, TrainedPartsConfig(part=self.part))
        methods = {"shard_blocks": tuple, "frozen_models": tuple, "shard_dtype": lambda: None}
        return SimpleNamespace(policy=policy, model=SimpleNamespace(reference=reference), **methods)


def write_camera_layers(folder: Path) -> None:
    """Other weights than those of the pipeline's transformer, under the original names."""
    transformer = load_transformer(WanTransformer3DModel, folder / "pipeline", "float32", torch.device("cpu"))
    add_camera_layers(transformer)
    for weight in transformer.parameters():
        weight.data += torch.randn_like(weight)
    torch.save(original_state(transformer), folder / "recam.ckpt")


def configs(folder: Path) -> dict[str, Any]:
    chat = tiny.chat.recipe(folder / "chat").workload
    flow = {"train": TrainedPartsConfig(part="all"), "dtype": "float32"}
    return {
        "chat with a copy": replace(chat, policy=PolicyConfig(model=chat.policy.model, reference="copy")),
        "chat with a tied head": load_recipe("chat").workload,
        "chat lora": replace(chat, policy=PolicyConfig(model=chat.policy.model, lora_rank=2)),
        "wan lora": config_of(folder / "wan-2.1", "wan-2.1", train=LORA, dtype="bfloat16"),
        "camera": CameraConfig(folder / "wan-2.1", "camera"),
        "camera and attention": CameraConfig(folder / "wan-2.1", "recam"),
        "sd3": config_of(folder / "sd3", "sd3", **flow),
    }


def held(config: Any, comm: Comm, *, deferred: bool) -> dict[str, Tensor]:
    """All weights and buffers of the policy and its frozen copy, whole, and how the policy computes."""
    with deferring_weights(deferred):
        workload = config.build(comm.device)
    assert is_deferred(workload.policy) == deferred
    _shard(gw.Config(config, conditions_per_step=12, shard="full"), comm, workload)
    models = {"policy": workload.policy} | {f"frozen {i}": each for i, (each, _) in enumerate(workload.frozen_models())}
    tensors = {
        f"{label} {name}": full(tensor.detach()).clone()
        for label, model in models.items()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    trained = sum(weight.numel() for weight in workload.policy.parameters() if weight.requires_grad)
    shares = getattr(workload.policy, "shares_prefix", None)
    ties = len(list(workload.policy.named_parameters(remove_duplicate=False)))
    with rollout_weights(workload.policy):
        dtypes = [weight.dtype.itemsize for weight in workload.policy.parameters()]
    reshard(workload.policy)
    if isinstance(config, CameraConfig):
        with workload.model.reference():
            reshard(workload.policy)
            tensors |= {f"initial {n}": full(w.detach()).clone() for n, w in workload.policy.named_parameters()}
        reshard(workload.policy)
    return tensors | {"counts": torch.tensor([trained, ties, float(bool(shares)), *dtypes])}


def run_rank(rank: int, ranks: int, port: int, folder: Path) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}
    comm, differing = connect("cpu"), {}
    for case, config in configs(folder).items():
        whole, read = (held(config, comm, deferred=deferred) for deferred in (False, True))
        names = set(whole) ^ set(read) | {name for name in whole if not same(whole[name], read.get(name))}
        differing[case] = [len(whole), *sorted(names)]
    if comm.is_main:
        (folder / f"{ranks}.json").write_text(json.dumps(differing))
    disconnect()
    exit_now()


def same(first: Tensor, second: Tensor | None) -> bool:
    return second is not None and first.dtype == second.dtype and torch.equal(first, second)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for name in ("wan-2.1", "sd3"):
        save_pipeline(name, folder / name)
    write_camera_layers(folder / "wan-2.1")
    for config in configs(folder).values():
        config.build(torch.device("cpu"))
    for count in map(int, sys.argv[2:]):
        start_processes(run_rank, (count, free_port(), folder), nprocs=count, start_method="fork")
