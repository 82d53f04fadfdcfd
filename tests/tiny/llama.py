"""Tiny random language models of the supported families, and a model folder with a byte tokenizer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

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
    return make_model(transformers.LlamaConfig(**{**SMALL, "num_key_value_heads": key_value_heads, **changes}))


def qwen3(**changes: Any) -> Any:
    return make_model(transformers.Qwen3Config(**{**SMALL, "num_key_value_heads": 2, "head_dim": 16, **changes}))


def olmoe(**changes: Any) -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}
    return make_model(transformers.OlmoeConfig(**{**SMALL, **experts, **changes}))


def qwen3_moe(**changes: Any) -> Any:
    """Llama-like but for its experts."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    heads = {"num_key_value_heads": 2, "head_dim": 16}
    return make_model(transformers.Qwen3MoeConfig(**{**SMALL, **experts, **heads, **changes}))


def gpt2() -> Any:
    """It normalizes in the dtype it computes in, so float64 stays float64 throughout."""
    return make_model(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
        )
    )


FAMILIES = {"llama": llama, "qwen3": qwen3, "olmoe": olmoe, "qwen3_moe": qwen3_moe, "gpt2": gpt2}


def make_model(config: Any, std: float = 0.3) -> Any:
    """Random weights, large enough for peaked distributions."""
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=std)
    return model.eval()


def ragged_prompts(count: int = 3, *, shortest: int = 1, longest: int = 9, seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [
        [generator.randrange(3, VOCABULARY) for _ in range(generator.randint(shortest, longest))] for _ in range(count)
    ]


def rows_for(groups: int, members: int, *, seed: int = 3, step: int = 2) -> RolloutRows:
    group = torch.arange(groups).repeat_interleave(members)
    return RolloutRows(seed, step, groups * members, group + 7, torch.arange(members).repeat(groups), group)


END = "<end>"
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def byte_tokenizer(*, end: bool = True, template: str | None = TEMPLATE) -> transformers.PreTrainedTokenizerFast:
    """Every byte is a token, and so are the roles."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([END, "<user>", "<assistant>", "<system>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=END if end else None, chat_template=template
    )


def byte_llama(
    tokenizer: transformers.PreTrainedTokenizerFast, *, positions: int = 128, seed: int = 0
) -> transformers.LlamaForCausalLM:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=positions,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def save_model(folder: Path, **options: object) -> Path:
    """A folder as `policy.model` takes it."""
    tokenizer = byte_tokenizer(**{key: options.pop(key) for key in ("end", "template") if key in options})
    byte_llama(tokenizer, **options).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
