"""Rows of a dataset as prompts: token ids made once, by the tokenizer's template, and a group id from all content."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.groups import group_id
from groupwise.data.rows import BadRowError, Record, Records, RowFilter, format_counts
from groupwise.workloads.chat.config import DataConfig, JudgeConfig
from groupwise.workloads.chat.rewards import check_answer

_RESERVED_COLUMNS = ("prompts", "completions", "completion_ids")


@dataclass(frozen=True)
class PromptSet:
    """What completions are asked for."""

    ids: list[tuple[int, ...]]
    shown: list[Any]
    """What rewards receive as `prompts`: messages, a text or token ids."""
    columns: Mapping[str, list[Any]]
    """All other columns, for rewards."""
    group_ids: Int64[Tensor, " prompts"]
    dropped: Counter[str]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_dialogue(self) -> bool:
        return isinstance(self.shown[0], list) and isinstance(self.shown[0][0], Mapping)


@dataclass(frozen=True)
class PromptLimits:
    """What a model can take."""

    longest: int | None
    """Tokens of a prompt and its completion together."""
    max_new_tokens: int
    vocabulary: int

    def most(self, config: DataConfig) -> int | None:
        """Tokens that a prompt may have."""
        room = None if self.longest is None else self.longest - self.max_new_tokens
        return min((most for most in (room, config.longest_prompt) if most is not None), default=None)


def make_prompt_set(
    table: Records, tokenizer: Any, config: DataConfig, judge: JudgeConfig, limits: PromptLimits
) -> PromptSet:
    """Every usable row as a prompt. One that is too long is refused or dropped, never cut."""
    sieve, kept, ids, shown = RowFilter(config.bad_rows), [], [], []
    for row, place in zip(table.rows, table.places, strict=True):
        try:
            check_answer(row, judge)
            prompt = _normalize_prompt(row[config.prompt_column], config)
            tokens = _encode(prompt, tokenizer, config)
            _check_tokens(tokens, limits, config)
        except BadRowError as bad:
            sieve.drop(place, bad)
            continue
        kept.append(row)
        ids.append(tokens)
        shown.append(prompt)
    if not kept:
        raise UserError(f"No row of the dataset can be used: {format_counts(sieve.dropped)}. See data.bad_rows.")
    names = [name for name in kept[0] if name != config.prompt_column]
    for name in set(names) & set(_RESERVED_COLUMNS):
        raise UserError(f"The dataset has a column '{name}', which rewards receive something else under. Rename it.")
    return PromptSet(
        ids,
        shown,
        {name: [row[name] for row in kept] for name in names},
        torch.tensor([_group_id(nth, tokens, row) for nth, (tokens, row) in enumerate(zip(ids, kept, strict=True))]),
        table.dropped + sieve.dropped,
    )


def _group_id(nth: int, tokens: tuple[int, ...], row: Record) -> int:
    """From the tokens and all columns: equal prompts with other right answers are other conditions."""
    return group_id(nth, json.dumps(tokens), json.dumps(row, sort_keys=True, default=str))


def _normalize_prompt(content: Any, config: DataConfig) -> Any:
    """Token ids and untemplated text stay as they are; all else becomes messages."""
    if isinstance(content, str):
        if not content.strip():
            raise BadRowError("empty prompt", f"column '{config.prompt_column}' is empty.")
        return content if config.template == "none" else [*_system(config), {"role": "user", "content": content}]
    if not isinstance(content, list | tuple) or not content:
        told = "is empty" if isinstance(content, list | tuple) else f"holds {type(content).__name__}"
        raise BadRowError(
            "empty prompt" if isinstance(content, list | tuple) else "prompt of another type",
            f"column '{config.prompt_column}' {told}: a prompt is a text, a list of messages or a list of token ids.",
        )
    if all(isinstance(token, int) and not isinstance(token, bool) for token in content):
        return list(content)
    return _messages(list(content), config)


def _messages(content: list[Any], config: DataConfig) -> list[dict[str, str]]:
    if not all(isinstance(message, Mapping) and {"role", "content"} <= set(message) for message in content):
        raise BadRowError(
            "prompt of another type",
            f"column '{config.prompt_column}' is a list whose entries are neither all token ids nor all messages with"
            " 'role' and 'content'.",
        )
    if content[-1]["role"] == "assistant":
        raise BadRowError("ends in a reply", "its last message is the assistant's, so nothing is left to say.")
    if not any(str(message["content"]).strip() for message in content):
        raise BadRowError("empty prompt", "all of its messages are empty.")
    return [*_system(config), *({key: message[key] for key in message} for message in content)]


def _system(config: DataConfig) -> list[dict[str, str]]:
    return [{"role": "system", "content": config.system}] if config.system else []


def _encode(prompt: Any, tokenizer: Any, config: DataConfig) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(tokenizer(prompt)["input_ids"])
    if isinstance(prompt[0], int):
        return tuple(prompt)
    if not tokenizer.chat_template:
        raise UserError(
            "The tokenizer has no chat template, so messages cannot become a prompt. Take data.template 'none' with"
            " prompts that are texts, or a tokenizer with a template (its file chat_template.jinja)."
        )
    return tuple(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))


def _check_tokens(tokens: tuple[int, ...], limits: PromptLimits, config: DataConfig) -> None:
    if not tokens:
        raise BadRowError("empty prompt", "its prompt has no tokens.")
    if not 0 <= min(tokens) <= max(tokens) < limits.vocabulary:
        raise BadRowError(
            "unknown token",
            f"its prompt holds token {max(tokens)} and the model has a vocabulary of {limits.vocabulary}: model and"
            " tokenizer do not belong together.",
        )
    most = limits.most(config)
    if most is not None and len(tokens) > most:
        allowed = (
            f"data.longest_prompt is {config.longest_prompt}"
            if most == config.longest_prompt
            else f"the model has {limits.longest} positions, of which sampling.max_new_tokens takes"
            f" {limits.max_new_tokens}"
        )
        raise BadRowError("overlong prompt", f"its prompt has {len(tokens)} tokens, and {allowed}.")
