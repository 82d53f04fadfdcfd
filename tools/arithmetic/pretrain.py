"""Next-token prediction on dialogues that are generated on the fly, with checkpoints to continue from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from groupwise.workloads.chat.tasks.arithmetic.task import (
    Message,
    Split,
    answer_directly,
    assistant,
    draw_problem,
    make_dialogue,
    remaining_problem,
    solve_step_by_step,
)
from tools.arithmetic.tokenizer import CONTEXT
from tools.pretraining import restore_pretraining_state, save_pretraining_state

_IGNORE_INDEX = -100


@dataclass(frozen=True)
class PretrainConfig:
    """Everything a pretraining run depends on."""

    seed: int = 0
    steps: int = 1000
    horizon: int = 1400
    """Length of the learning rate schedule. `steps` is smaller on purpose: GRPO needs sums that are half learned."""
    dialogues_per_step: int = 64
    dialogues_per_pass: int = 16
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    direct_answer_fraction: float = 0.55
    """Fraction of the dialogues that are answered directly; the others step by step. All answers are correct."""
    width: int = 128
    layers: int = 3
    heads: int = 4
    key_value_heads: int = 2
    hidden: int = 256

    def random(self, step: int) -> np.random.Generator:
        """The generator of a step, which does not depend on earlier steps."""
        return np.random.default_rng([self.seed, step])

    def learning_rate_at(self, step: int) -> float:
        """Linear warmup, then a cosine down to a fiftieth."""
        ramp = min(1.0, (step + 1) / self.warmup_steps)
        return self.learning_rate * ramp * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / self.horizon)))


def new_model(config: PretrainConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(config.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.width,
            intermediate_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.key_value_heads,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def pretrain(
    config: PretrainConfig,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    *,
    on_step: Callable[[int, float], None],
    stop_after: int | None = None,
    checkpoint_every: int = 100,
) -> LlamaForCausalLM:
    """Train from the checkpoint in `folder`, or from the start if there is none.

    `on_step` gets the number of steps done and the loss. `stop_after` ends the call at that step, as a kill would.
    """
    model = new_model(config, tokenizer).train()
    optimizer = _make_optimizer(model, config)
    steps_done = restore_pretraining_state(folder, config, model, optimizer)
    for step in range(steps_done, config.steps if stop_after is None else stop_after):
        optimizer.zero_grad(set_to_none=True)
        loss = _accumulate(model, list(batches(config, tokenizer, step)))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate_at(step)
        optimizer.step()
        on_step(step + 1, loss)
        if (step + 1) % checkpoint_every == 0 or step + 1 == config.steps:
            save_pretraining_state(folder, config, model, optimizer, step + 1)
    return model.eval()


def _accumulate(model: LlamaForCausalLM, micro_batches: list[tuple[Tensor, Tensor]]) -> float:
    """Accumulate the gradient of the mean loss over all labels of the step; returns that mean."""
    num_labels = sum(int((labels != _IGNORE_INDEX).sum()) for _, labels in micro_batches)
    total = 0.0
    for ids, labels in micro_batches:
        logits = model(input_ids=ids).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / num_labels
        loss.backward()
        total += loss.item()
    return total


def batches(config: PretrainConfig, tokenizer: PreTrainedTokenizerFast, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The step's dialogues in padded micro-batches of similar length, with labels for the last reply only."""
    random = config.random(step)
    questions, dialogues = zip(*(_make_sample(config, random) for _ in range(config.dialogues_per_step)), strict=True)
    prompts = _encode(tokenizer, questions, add_generation_prompt=True)
    sequences = _encode(tokenizer, dialogues)
    order = sorted(range(len(sequences)), key=lambda row: len(sequences[row]))
    for start in range(0, len(order), config.dialogues_per_pass):
        rows = order[start : start + config.dialogues_per_pass]
        ids = torch.full((len(rows), len(sequences[rows[-1]])), tokenizer.pad_token_id)
        labels = torch.full_like(ids, _IGNORE_INDEX)
        for line, row in enumerate(rows):
            start_of_reply, end = len(prompts[row]), len(sequences[row])
            assert sequences[row][:start_of_reply] == prompts[row], "the template appends the reply to the prompt"
            ids[line, :end] = torch.tensor(sequences[row])
            labels[line, start_of_reply:end] = ids[line, start_of_reply:end]
        yield ids, labels


def _make_sample(config: PretrainConfig, random: np.random.Generator) -> tuple[list[Message], list[Message]]:
    """A prompt, and the dialogue that ends with a correct reply to it."""
    problem = draw_problem(random, Split.TRAIN)
    messages = make_dialogue(problem, random)
    rest = remaining_problem(problem, messages)
    reply = answer_directly(rest) if random.random() < config.direct_answer_fraction else solve_step_by_step(rest)
    return messages, [*messages, assistant(reply)]


def _encode(tokenizer: PreTrainedTokenizerFast, dialogues: Sequence[list[Message]], **options: Any) -> list[list[int]]:
    texts = tokenizer.apply_chat_template(list(dialogues), tokenize=False, **options)
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def _make_optimizer(model: nn.Module, config: PretrainConfig) -> torch.optim.Optimizer:
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
    others = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.98), fused=True)
