"""From settings to a workload: model, tokenizer, prompts and rewards are loaded, and refused where they do not fit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from groupwise.core.errors import UserError
from groupwise.workloads.chat.arithmetic.dialogues import rows
from groupwise.workloads.chat.arithmetic.problems import Split
from groupwise.workloads.chat.config import EMBEDDED, ChatConfig
from groupwise.workloads.chat.policy import Policy, load_policy
from groupwise.workloads.chat.prompts import Limits, Prompts, make_prompts
from groupwise.workloads.chat.rewards import required_columns, reward_functions
from groupwise.workloads.chat.table import Table, read_table
from groupwise.workloads.chat.workload import ChatParts, ChatWorkload

ASSET = Path(__file__).parent / "arithmetic" / "asset"
_EMBEDDED_ROWS = {Split.TRAIN: 2048, Split.HELD_OUT: 512}


def build(config: ChatConfig, device: torch.device) -> ChatWorkload:
    """Everything on one device; the same on every rank."""
    policy = first_policy(config, device)
    tokenizer = load_tokenizer(config)
    sampling = replace(config.sampling, stop_ids=stop_ids(config, tokenizer, policy))
    functions = reward_functions(config.judge, max_new_tokens=sampling.max_new_tokens)
    limits = Limits(policy.longest, sampling.max_new_tokens, policy.causal_lm.config.vocab_size)
    training = _prompts(config.data.train, Split.TRAIN, tokenizer, config, limits)
    held_out = None
    if config.data.held_out:
        held_out = _prompts(config.data.held_out, Split.HELD_OUT, tokenizer, config, limits)
    return ChatWorkload(ChatParts(policy, tokenizer, training, held_out, functions, sampling), config)


def first_policy(config: ChatConfig, device: torch.device) -> Policy:
    """The policy as it is before training."""
    return load_policy(replace(config.policy, model=source(config)), device)


def source(config: ChatConfig) -> str:
    """Where model and tokenizer come from."""
    return str(ASSET) if config.policy.model == EMBEDDED else config.policy.model


def load_tokenizer(config: ChatConfig) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(source(config))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(
            f"policy.model is {config.policy.model!r}, whose tokenizer cannot be loaded:"
            f" {' '.join(str(error).split())[:300]} Put the files of its tokenizer beside the model."
        ) from error


def stop_ids(config: ChatConfig, tokenizer: Any, policy: Policy) -> tuple[int, ...]:
    """The tokenizer's end-of-sequence token, those of the model's generation config, and the user's own."""
    found = set(config.sampling.stop_ids)
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    own = getattr(policy.causal_lm.generation_config, "eos_token_id", None)
    found |= set(own if isinstance(own, list | tuple) else [own] if own is not None else [])
    for token in config.stop_tokens:
        number = tokenizer.convert_tokens_to_ids(token)
        if number is None or number == tokenizer.unk_token_id:
            raise UserError(
                f"stop_tokens names {token!r}, which is not one token of the tokenizer. Name a token of it."
            )
        found.add(number)
    if not found:
        raise UserError(
            f"The tokenizer of {config.policy.model!r} has no end-of-sequence token and the model's generation config"
            " names none, so no completion would ever end by itself. Name the token that ends one:"
            " --workload.stop-tokens TOKEN."
        )
    return tuple(sorted(found))


def _prompts(where: str, split: Split, tokenizer: Any, config: ChatConfig, limits: Limits) -> Prompts:
    if where == EMBEDDED:
        made = [
            {config.data.prompt_column: row["messages"], config.judge.answer_column: row["answer"]}
            for row in _embedded(split)
        ]
        table = Table(made, [f"{EMBEDDED} question {nth}" for nth in range(len(made))], dropped=Counter())
    else:
        required = (config.data.prompt_column, *required_columns(config.judge))
        table = read_table(where, required=required, bad_rows=config.data.bad_rows)
    return make_prompts(table, tokenizer, config.data, config.judge, limits)


def _embedded(split: Split) -> list[dict[str, Any]]:
    return rows(split, _EMBEDDED_ROWS[split], seed=0)
