"""Completions of prompts: what a member says depends only on (weights, prompt, seed, step, group, member)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from groupwise.core.errors import UserError, require
from groupwise.core.placement import RolloutRows
from groupwise.core.randomness import uniform
from groupwise.workloads.chat.engine.plain import generate_plain
from groupwise.workloads.chat.engine.policy import LanguageModelPolicy
from groupwise.workloads.chat.engine.sampler import Completion, SamplingParams
from groupwise.workloads.chat.engine.scheduler import Flight

__all__ = ["Completion", "check_prompts", "generate"]


def generate(
    policy: LanguageModelPolicy,
    prompts: Sequence[Sequence[int]],
    prompt_of_row: Sequence[int],
    rows: RolloutRows,
    sampling: SamplingParams,
    *,
    decode_rows: int | None = None,
) -> list[Completion]:
    """A completion for every row, in the rows' order; row r completes prompts[prompt_of_row[r]].

    `decode_rows` caps how many rows are in flight, and so the memory of the cache. It changes nothing else.
    """
    assert len(prompt_of_row) == len(rows), "a prompt for every row"
    require(decode_rows is None or decode_rows >= 1, "decode_rows", decode_rows, "1 or more, or None for all")
    check_prompts(policy, prompts, sampling)
    chances = token_uniforms(rows, sampling.max_new_tokens)
    if policy.shares_prompts:
        return Flight(policy, prompts, prompt_of_row, chances, sampling, decode_rows or len(rows)).run()
    of_rows = [prompts[nth] for nth in prompt_of_row]
    return _generate_plainly(policy, of_rows, chances, sampling, decode_rows or len(rows))


def _generate_plainly(
    policy: LanguageModelPolicy,
    prompts: Sequence[Sequence[int]],
    chances: Tensor,
    sampling: SamplingParams,
    decode_rows: int,
) -> list[Completion]:
    completions: list[Completion] = []
    for start in range(0, len(prompts), decode_rows):
        part = slice(start, start + decode_rows)
        completions += generate_plain(policy, prompts[part], chances[part], sampling)
    return completions


def token_uniforms(rows: RolloutRows, tokens: int) -> Tensor:
    """The random number of every token that a row may draw: [rows, tokens], in float64."""
    return uniform(rows.seed, rows.step, rows.group[:, None], rows.member[:, None], torch.arange(tokens))


def check_prompts(policy: LanguageModelPolicy, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> None:
    """Refuse what the model cannot complete; nothing is cut short in silence."""
    vocabulary, longest = policy.causal_lm.config.vocab_size, policy.longest
    for nth, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(
                f"Prompt {nth} has no tokens: a completion needs at least one to follow. Remove the prompt."
            )
        if not (min(prompt) >= 0 and max(prompt) < vocabulary):
            raise UserError(
                f"Prompt {nth} holds token {max(prompt)} and the model has a vocabulary of {vocabulary}: model and"
                " tokenizer do not belong together."
            )
        if longest is not None and len(prompt) + sampling.max_new_tokens > longest:
            raise UserError(
                f"Prompt {nth} has {len(prompt)} tokens, and with sampling.max_new_tokens {sampling.max_new_tokens} it"
                f" is longer than the {longest} positions of the model. Shorten or drop the prompt, or lower"
                " sampling.max_new_tokens."
            )
