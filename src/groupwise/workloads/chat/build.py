"""From settings to a workload: load model, tokenizer, prompts and rewards. And `export` of a trained run as a folder
that transformers loads, with its adapter merged.
"""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from groupwise.core.errors import UserError
from groupwise.core.io.files import read_json
from groupwise.core.io.json_types import misfit
from groupwise.data.rows import RowFilter, read_rows
from groupwise.workloads.chat.config import ChatConfig, PolicyConfig
from groupwise.workloads.chat.data import PromptLimits, PromptSet, make_prompt_set
from groupwise.workloads.chat.engine.policy import LanguageModelPolicy, load_policy
from groupwise.workloads.chat.rewards import reward_functions
from groupwise.workloads.chat.workload import ChatComponents, ChatWorkload
from groupwise.workloads.checkpoint_files import (
    has_ema,
    load_weights,
    newest_valid_checkpoint,
    refuse_other_adapter,
    tensors_of,
)
from groupwise.workloads.lora import merge_lora

_SHARD_BYTES = 1 << 30
"""Of an exported file: safetensors copies so much before it writes."""


def build(config: ChatConfig, device: torch.device) -> ChatWorkload:
    """Load the workload on one device. Every rank loads the same."""
    policy = base_policy(config, device)
    tokenizer = load_tokenizer(config)
    sampling = replace(config.sampling, stop_token_ids=stop_token_ids(config, tokenizer, policy))
    functions = reward_functions(config.rewards, max_new_tokens=sampling.max_new_tokens)
    limits = PromptLimits(policy.max_positions, sampling.max_new_tokens, policy.causal_lm.config.vocab_size)
    training = _load_prompts("train", tokenizer, config, limits)
    held_out = _load_prompts("held_out", tokenizer, config, limits) if config.data.held_out else None
    return ChatWorkload(ChatComponents(policy, tokenizer, training, held_out, functions, sampling), config)


def base_policy(config: ChatConfig, device: torch.device) -> LanguageModelPolicy:
    """The policy as it is before training."""
    return load_policy(config.policy, device)


def load_tokenizer(config: ChatConfig) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(config.policy.folder_or_name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(
            f"policy.model is {config.policy.model!r}, whose tokenizer cannot be loaded:"
            f" {' '.join(str(error).split())[:300]} Put the files of its tokenizer beside the model."
        ) from error


def stop_token_ids(config: ChatConfig, tokenizer: Any, policy: LanguageModelPolicy) -> tuple[int, ...]:
    """The tokenizer's end-of-sequence token, those of the model's generation config, and the configured ones."""
    stop_ids = set(config.sampling.stop_token_ids)
    if tokenizer.eos_token_id is not None:
        stop_ids.add(tokenizer.eos_token_id)
    model_ids = getattr(policy.causal_lm.generation_config, "eos_token_id", None)
    if model_ids is not None:
        stop_ids |= set(model_ids if isinstance(model_ids, list | tuple) else [model_ids])
    for token in config.stop_tokens:
        token_id = tokenizer.convert_tokens_to_ids(token)
        if token_id is None or token_id == tokenizer.unk_token_id:
            raise UserError(
                f"stop_tokens names {token!r}, which is not one token of the tokenizer. Name a token of it."
            )
        stop_ids.add(token_id)
    if not stop_ids:
        raise UserError(
            f"The tokenizer of {config.policy.model!r} has no end-of-sequence token and the model's generation config"
            " names none, so no completion would ever end by itself. Name the token that ends one:"
            " --workload.stop-tokens TOKEN."
        )
    return tuple(sorted(stop_ids))


def _load_prompts(
    name: Literal["train", "held_out"], tokenizer: Any, config: ChatConfig, limits: PromptLimits
) -> PromptSet:
    row_filter = RowFilter(config.data.on_bad_row, "--workload.data.on-bad-row")
    records = read_rows(getattr(config.data, name), row_filter, setting=f"data.{name}")
    return make_prompt_set(records, row_filter, tokenizer, config, limits)


def export(
    run: Path | str,
    folder: Path | str,
    *,
    adapter: bool = False,
    ema: bool | None = None,
    checkpoint: Path | None = None,
) -> Path:
    """Write model and tokenizer of the run's newest valid checkpoint; by default EMA weights where the run has them.

    A LoRA adapter is merged; with `adapter` it is written alone, as PEFT does. Files hold at most 1 GiB each: that much
    is in memory besides the model. `checkpoint`: one that has been checked already.
    """
    run, folder = Path(run), Path(folder)
    if checkpoint is None:
        checkpoint = newest_valid_checkpoint(run / "checkpoints", lambda message: warnings.warn(message, stacklevel=2))
    if checkpoint is None or not (run / "config.json").is_file():
        raise UserError(f"{run} holds no checkpoint of a run. Name a run folder, such as runs/chat.")
    config = ChatConfig(policy=replace(_policy_config(run), reference="none"))  # no second copy of the model
    if adapter and config.policy.lora_rank is None:
        raise UserError(f"The run in {run} trained all weights, so it has no adapter. Leave --adapter away.")
    if config.policy.lora_rank is not None:
        refuse_other_adapter(checkpoint, config.policy.lora_rank)
    policy = base_policy(config, torch.device("cpu"))
    load_weights(checkpoint, tensors_of(policy), ema=has_ema(checkpoint) if ema is None else ema)
    if config.policy.lora_rank is not None and not adapter:
        merge_lora(policy.model)
    policy.model.save_pretrained(folder, max_shard_size=_SHARD_BYTES)
    load_tokenizer(config).save_pretrained(folder)
    return folder


def _policy_config(run: Path) -> PolicyConfig:
    workload = read_json(run / "config.json").get("workload")
    saved = workload.get("policy") if isinstance(workload, dict) else None
    if not isinstance(saved, dict):
        raise UserError(f"The run in {run} is of another workload than chat, so it has no language model to export.")
    known = {field.name for field in fields(PolicyConfig)}
    values: dict[str, Any] = {name: value for name, value in saved.items() if name in known}
    problem = misfit(PolicyConfig, values)
    if problem or "lora_targets" not in values:
        reason = problem or "'lora_targets' is missing"
        raise UserError(f"{run / 'config.json'} is damaged (in 'workload.policy' {reason}). Restore it.")
    return PolicyConfig(**{**values, "lora_targets": tuple(values["lora_targets"])})
