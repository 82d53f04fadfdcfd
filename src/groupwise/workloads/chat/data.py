"""Rows of a dataset as prompts: chat template, token ids, group ids, length checks."""

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
from groupwise.data.rows import BadRow, Record, Records, RowFilter, format_counts, require_columns
from groupwise.workloads.chat.config import ChatConfig, DataConfig
from groupwise.workloads.chat.rewards import check_answer, required_columns

_RESERVED_COLUMNS = ("prompts", "completions", "completion_ids")
_COLUMN_SETTINGS = "data.prompt_column and rewards.answer_column name the columns."


@dataclass(frozen=True)
class PromptSet:
    """Prompts to complete."""

    ids: list[tuple[int, ...]]
    reward_inputs: list[Any]
    """What rewards receive as `prompts`: messages, a text or token ids."""
    columns: Mapping[str, list[Any]]
    """All other columns, for rewards."""
    group_ids: Int64[Tensor, " prompts"]
    skipped: Counter[str]
    """How many rows were skipped, by reason."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_chat(self) -> bool:
        return isinstance(self.reward_inputs[0], list) and isinstance(self.reward_inputs[0][0], Mapping)


@dataclass(frozen=True)
class PromptLimits:
    """What a model accepts."""

    max_positions: int | None
    """Tokens of a prompt and its completion together."""
    max_new_tokens: int
    vocabulary: int

    def max_prompt_tokens(self, config: DataConfig) -> int | None:
        """Tokens that a prompt may have."""
        left = None if self.max_positions is None else self.max_positions - self.max_new_tokens
        return min((limit for limit in (left, config.max_prompt_tokens) if limit is not None), default=None)


def make_prompt_set(
    records: Records, row_filter: RowFilter, tokenizer: Any, config: ChatConfig, limits: PromptLimits
) -> PromptSet:
    """Every usable row as a prompt. One that is too long is refused or skipped, never truncated."""
    rows: list[Record] = []
    ids: list[tuple[int, ...]] = []
    prompts = []
    for row, source in zip(records.rows, records.sources, strict=True):
        try:
            _check_columns(row, rows[0] if rows else row, config)
            check_answer(row, config.rewards)
            prompt = _normalize_prompt(row[config.data.prompt_column], config.data)
            tokens = _encode(prompt, tokenizer, config.data)
            _check_tokens(tokens, limits, config.data)
        except BadRow as bad:
            row_filter.reject(source, bad)
            continue
        rows.append(row)
        ids.append(tokens)
        prompts.append(prompt)
    if not rows:
        raise UserError(f"No row of the dataset can be used: {format_counts(row_filter.skipped)}. See data.on_bad_row.")
    names = [name for name in rows[0] if name != config.data.prompt_column]
    for name in set(names) & set(_RESERVED_COLUMNS):
        raise UserError(f"The dataset has a column '{name}', a name under which rewards get something else. Rename it.")
    return PromptSet(
        ids,
        prompts,
        {name: [row[name] for row in rows] for name in names},
        torch.tensor([_group_id(index, *content) for index, content in enumerate(zip(ids, rows, strict=True))]),
        row_filter.skipped,
    )


def _check_columns(row: Record, first: Record, config: ChatConfig) -> None:
    require_columns(row, (config.data.prompt_column, *required_columns(config.rewards)), _COLUMN_SETTINGS)
    if set(row) != set(first):
        name = sorted(set(row) ^ set(first))[0]
        raise BadRow(
            "with other columns",
            f"column '{name}' is {'missing here' if name in first else 'not in the rows before'}: all rows must have"
            " the same ones, because rewards receive them as lists.",
        )


def _group_id(index: int, tokens: tuple[int, ...], row: Record) -> int:
    """From the tokens and all columns: equal prompts with different answers are different conditions."""
    return group_id(index, json.dumps(tokens), json.dumps(row, sort_keys=True, default=str))


def _normalize_prompt(content: Any, config: DataConfig) -> Any:
    """Token ids, and text without a template, stay as they are; all else becomes messages."""
    if isinstance(content, str):
        if not content.strip():
            raise BadRow("empty prompt", f"column '{config.prompt_column}' is empty.")
        return content if config.template == "none" else [*_system(config), {"role": "user", "content": content}]
    if not isinstance(content, list | tuple) or not content:
        problem = "is empty" if isinstance(content, list | tuple) else f"holds {type(content).__name__}"
        raise BadRow(
            "empty prompt" if isinstance(content, list | tuple) else "prompt of another type",
            f"column '{config.prompt_column}' {problem}: a prompt is a text, a list of messages or a list of token"
            " ids.",
        )
    if all(isinstance(token, int) and not isinstance(token, bool) for token in content):
        return list(content)
    return _messages(list(content), config)


def _messages(content: list[Any], config: DataConfig) -> list[dict[str, str]]:
    if not all(isinstance(message, Mapping) and {"role", "content"} <= set(message) for message in content):
        raise BadRow(
            "prompt of another type",
            f"column '{config.prompt_column}' is a list whose entries are neither all token ids nor all messages with"
            " 'role' and 'content'.",
        )
    if content[-1]["role"] == "assistant":
        raise BadRow("ends in a reply", "its last message is the assistant's, so there is nothing to complete.")
    if not any(str(message["content"]).strip() for message in content):
        raise BadRow("empty prompt", "all of its messages are empty.")
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
        raise BadRow("empty prompt", "its prompt has no tokens.")
    if not 0 <= min(tokens) <= max(tokens) < limits.vocabulary:
        raise BadRow(
            "unknown token",
            f"its prompt holds token {max(tokens)} and the model has a vocabulary of {limits.vocabulary}: model and"
            " tokenizer do not belong together.",
        )
    limit = limits.max_prompt_tokens(config)
    if limit is not None and len(tokens) > limit:
        allowed = (
            f"data.max_prompt_tokens is {config.max_prompt_tokens}"
            if limit == config.max_prompt_tokens
            else f"the model has {limits.max_positions} positions, of which sampling.max_new_tokens takes"
            f" {limits.max_new_tokens}"
        )
        raise BadRow("overlong prompt", f"its prompt has {len(tokens)} tokens, and {allowed}.")
