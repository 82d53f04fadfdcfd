"""Pretraining: next-token prediction on dialogues made as they are needed. Any step can be left and taken up again."""

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

_NO_LABEL = -100


@dataclass(frozen=True)
class PretrainConfig:
    """All that a pretraining run depends on."""

    seed: int = 0
    steps: int = 1000
    horizon: int = 1400
    """The learning rate falls as if for so many steps. Ending sooner leaves the sums half learned."""
    dialogues_per_step: int = 64
    dialogues_per_pass: int = 16
    learning_rate: float = 3e-3
    warm_up_steps: int = 100
    weight_decay: float = 0.05
    at_once_share: float = 0.55
    """Share of the dialogues whose answer is given at once; the others work it out step by step. All are right."""
    width: int = 128
    layers: int = 3
    heads: int = 4
    key_value_heads: int = 2
    hidden: int = 256

    def random(self, step: int) -> np.random.Generator:
        """The numbers of this step: they depend on nothing that ran before."""
        return np.random.default_rng([self.seed, step])

    def rate(self, step: int) -> float:
        """A ramp, then a cosine down to a fiftieth."""
        ramp = min(1.0, (step + 1) / self.warm_up_steps)
        return self.learning_rate * ramp * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / self.horizon)))


def new_model(plan: PretrainConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(plan.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=plan.width,
            intermediate_size=plan.hidden,
            num_hidden_layers=plan.layers,
            num_attention_heads=plan.heads,
            num_key_value_heads=plan.key_value_heads,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


@dataclass(frozen=True)
class Progress:
    step: int
    loss: float


def pretrain(
    plan: PretrainConfig,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    *,
    watch: Callable[[Progress], None],
    stop_after: int | None = None,
    checkpoint_every: int = 100,
) -> LlamaForCausalLM:
    """Train as planned, going on from the checkpoint in `folder` if there is one of the same plan.

    `stop_after` ends the call early at that step, as a kill would.
    """
    model = new_model(plan, tokenizer).train()
    optimizer = _optimizer(model, plan)
    for step in range(
        restore_pretraining_state(folder, plan, model, optimizer), plan.steps if stop_after is None else stop_after
    ):
        optimizer.zero_grad(set_to_none=True)
        loss = _accumulate(model, list(batches(plan, tokenizer, step)))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = plan.rate(step)
        optimizer.step()
        watch(Progress(step + 1, loss))
        if (step + 1) % checkpoint_every == 0 or step + 1 == plan.steps:
            save_pretraining_state(folder, plan, model, optimizer, step + 1)
    return model.eval()


def _accumulate(model: LlamaForCausalLM, cuts: list[tuple[Tensor, Tensor]]) -> float:
    """The gradient of the mean loss over all labels of the step; returns that mean."""
    labelled = sum(int((labels != _NO_LABEL).sum()) for _, labels in cuts)
    total = 0.0
    for ids, labels in cuts:
        logits = model(input_ids=ids).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / labelled
        loss.backward()
        total += loss.item()
    return total


def batches(plan: PretrainConfig, tokenizer: PreTrainedTokenizerFast, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The step's dialogues in cuts of like length, padded, with labels: only the last reply is learned."""
    asked, answered = zip(
        *(_dialogue(plan, random) for random in [plan.random(step)] for _ in range(plan.dialogues_per_step)),
        strict=True,
    )
    prompts = _encode(tokenizer, asked, add_generation_prompt=True)
    wholes = _encode(tokenizer, answered)
    order = sorted(range(len(wholes)), key=lambda row: len(wholes[row]))
    for start in range(0, len(order), plan.dialogues_per_pass):
        rows = order[start : start + plan.dialogues_per_pass]
        ids = torch.full((len(rows), len(wholes[rows[-1]])), tokenizer.pad_token_id)
        labels = torch.full_like(ids, _NO_LABEL)
        for line, row in enumerate(rows):
            begin, end = len(prompts[row]), len(wholes[row])
            assert wholes[row][:begin] == prompts[row], "the template puts the reply after the prompt, changing nothing"
            ids[line, :end] = torch.tensor(wholes[row])
            labels[line, begin:end] = ids[line, begin:end]
        yield ids, labels


def _dialogue(plan: PretrainConfig, random: np.random.Generator) -> tuple[list[Message], list[Message]]:
    """What is asked, and the same with a right answer."""
    problem = draw_problem(random, Split.TRAIN)
    messages = make_dialogue(problem, random)
    rest = remaining_problem(problem, messages)
    reply = answer_directly(rest) if random.random() < plan.at_once_share else solve_step_by_step(rest)
    return messages, [*messages, assistant(reply)]


def _encode(tokenizer: PreTrainedTokenizerFast, dialogues: Sequence[list[Message]], **options: Any) -> list[list[int]]:
    texts = tokenizer.apply_chat_template(list(dialogues), tokenize=False, **options)
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def _optimizer(model: nn.Module, plan: PretrainConfig) -> torch.optim.Optimizer:
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
    others = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.98), fused=True)
