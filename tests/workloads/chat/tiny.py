"""A tiny random Llama with a tokenizer, saved on the spot; and a chat task small enough to learn in seconds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import groupwise as gw
from groupwise.workloads.chat.config import (
    ChatConfig,
    ChatEvalConfig,
    ChatRewardsConfig,
    DataConfig,
    PolicyConfig,
    SamplingParams,
)

END = "<end>"
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def byte_tokenizer(*, end: bool = True, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Every byte is a token, and so are the roles."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([END, "<user>", "<assistant>", "<system>"])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END if end else None, chat_template=template)


def llama(tokenizer: PreTrainedTokenizerFast, *, positions: int = 128, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
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
    llama(tokenizer, **options).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_lines(path: Path, rows: list[object]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


QUESTIONS = [{"prompt": f"say {number}", "answer": f"#### {number}"} for number in range(12)]


def early_letters(prompts, completions, **columns) -> list[float]:
    """A reward of one's own, with TRL's signature: something that a random model can learn in a few steps."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(letter < "m" for letter in text) / max(1, len(text)) for text in texts]


def chat_config(folder: Path, **changes: object) -> ChatConfig:
    """Twelve questions to a tiny model; the same files whenever it is asked for the same folder."""
    if not (folder / "model").exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_model(folder / "model")
        write_lines(folder / "train.jsonl", QUESTIONS)
    data = str(folder / "train.jsonl")
    base = ChatConfig(
        policy=PolicyConfig(model=str(folder / "model")),
        data=DataConfig(train=data, held_out=data),
        sampling=SamplingParams(max_new_tokens=6),
        rewards=ChatRewardsConfig(functions=("workloads.chat.tiny:early_letters",)),
        eval=ChatEvalConfig(questions=6, samples=2, report_samples=4, pass_from=0.5),
    )
    return replace(base, **changes)


def recipe(folder: Path, **changes: object) -> gw.Config:
    return gw.Config(
        chat_config(folder, **changes),
        steps=3,
        conditions_per_step=4,
        group_size=8,
        rows_per_pass=8,
        optimizer=gw.OptimizerConfig(learning_rate=3e-2),
    )
