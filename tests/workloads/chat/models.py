"""Tiny language models of the families that are supported, and rows to ask them with."""

from __future__ import annotations

import random
from typing import Any

import torch
import transformers

from groupwise.core.placement import RolloutRows

VOCABULARY = 96
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(*, key_value_heads: int = 2, **changes: Any) -> Any:
    return _made(transformers.LlamaConfig(**{**SMALL, "num_key_value_heads": key_value_heads, **changes}))


def qwen3(**changes: Any) -> Any:
    return _made(transformers.Qwen3Config(**{**SMALL, "num_key_value_heads": 2, "head_dim": 16, **changes}))


def olmoe(**changes: Any) -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}
    return _made(transformers.OlmoeConfig(**{**SMALL, **experts, **changes}))


def qwen3_moe(**changes: Any) -> Any:
    """Of Llama's build but for its experts."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    heads = {"num_key_value_heads": 2, "head_dim": 16}
    return _made(transformers.Qwen3MoeConfig(**{**SMALL, **experts, **heads, **changes}))


def gpt2() -> Any:
    """It normalizes in the dtype it computes in, so float64 stays float64 throughout."""
    return _made(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
        )
    )


FAMILIES = {"llama": llama, "qwen3": qwen3, "olmoe": olmoe, "qwen3_moe": qwen3_moe, "gpt2": gpt2}


def _made(config: Any, spread: float = 0.3) -> Any:
    """Weights wide enough for peaked, uneven distributions."""
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=spread)
    return model.eval()


def ragged_prompts(count: int = 3, *, shortest: int = 1, longest: int = 9, seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(3, VOCABULARY) for _ in range(chance.randint(shortest, longest))] for _ in range(count)]


def rows_for(groups: int, members: int, *, seed: int = 3, step: int = 2) -> RolloutRows:
    group = torch.arange(groups).repeat_interleave(members)
    return RolloutRows(seed, step, groups * members, group + 7, torch.arange(members).repeat(groups), group)
