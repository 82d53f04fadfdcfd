"""A small Llama under torch's FSDP2, and the bytes that it takes on a rank. Also a program for torchrun:

torchrun ... sharded_llama.py OUTPUT.json
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist  # noqa: TID251 - the plan is compared with what torch itself does
from allocator import peak_allocated
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh  # noqa: TID251
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # noqa: TID251
from torch.distributed.tensor import DTensor  # noqa: TID251
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TOKENS = 4
"""Few, so that weights and what is gathered of them make the peaks."""


def sharded_llama(dtype: torch.dtype) -> LlamaForCausalLM:
    """Each layer a unit, then the rest; kept in float32, gathered in `dtype`."""
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, tie_word_embeddings=False))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def measure_persistent(model: LlamaForCausalLM) -> dict[str, int]:
    """A rank's parts, after an update."""
    optimizer = torch.optim.AdamW(model.parameters())
    backward(model)
    optimizer.step()
    moments = (value for state in optimizer.state.values() for value in state.values())
    return {
        "weights": local_bytes(model.parameters()),
        "gradients": local_bytes(parameter.grad for parameter in model.parameters()),
        "optimizer": local_bytes(moments),
    }


def measure_peaks(dtype: torch.dtype) -> dict[str, int]:
    """The peak of each stage, besides what was held before."""
    model = sharded_llama(dtype)
    forward(model)  # the first call sets up what stays
    peaks = {}
    for name, stage in (("whole", gather_all), ("blocks", forward), ("one pass", backward), ("pass", backward)):
        reshard(model)
        peaks[name] = peak_allocated(lambda stage=stage: stage(model))
    model.zero_grad()
    peaks["step"] = peak_allocated(lambda: two_passes_one_exchange(model))
    return peaks


def backward(model: LlamaForCausalLM) -> None:
    model(input_ids=torch.arange(TOKENS)[None], use_cache=False).logits.float().square().mean().backward()


def two_passes_one_exchange(model: LlamaForCausalLM) -> None:
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        backward(model)


@torch.no_grad()
def forward(model: LlamaForCausalLM) -> None:
    model(input_ids=torch.arange(TOKENS)[None], use_cache=False)


def gather_all(model: LlamaForCausalLM) -> None:
    model.unshard()
    for layer in model.model.layers:
        layer.unshard()


def reshard(model: LlamaForCausalLM) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_bytes(tensors: Iterable[Tensor]) -> int:
    local = [tensor.to_local() for tensor in tensors if isinstance(tensor, DTensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    persistent = measure_persistent(sharded_llama(torch.bfloat16))
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(persistent))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)
