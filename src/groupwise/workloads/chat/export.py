"""The trained model of a run as a folder that transformers loads, its adapter merged in."""

from __future__ import annotations

import json
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from groupwise.core.errors import UserError
from groupwise.workloads.chat.build import first_policy, load_tokenizer
from groupwise.workloads.chat.config import ChatConfig
from groupwise.workloads.chat.engine_config import PolicyConfig
from groupwise.workloads.chat.policy import Policy
from groupwise.workloads.checkpoints import AVERAGED_WEIGHTS, WEIGHTS, newest_good


def export(run: Path | str, folder: Path | str) -> Path:
    """Write model and tokenizer of the run's newest good checkpoint; averaged weights where the run kept any."""
    run, folder = Path(run), Path(folder)
    checkpoint = newest_good(run / "checkpoints", lambda told: warnings.warn(told, stacklevel=2))
    if checkpoint is None or not (run / "config.json").is_file():
        raise UserError(f"{run} holds no checkpoint of a run. Name a run folder, such as runs/chat.")
    config = ChatConfig(policy=_policy_config(run))
    policy = first_policy(config, torch.device("cpu"))
    _fill(policy, checkpoint)
    model = policy.model if config.policy.lora_rank is None else policy.model.merge_and_unload()
    model.save_pretrained(folder)
    load_tokenizer(config).save_pretrained(folder)
    return folder


def _policy_config(run: Path) -> PolicyConfig:
    saved = json.loads((run / "config.json").read_text())["workload"].get("policy")
    if saved is None:
        raise UserError(f"The run in {run} is of another workload than chat, so it has no language model to export.")
    known = {field.name for field in fields(PolicyConfig)}
    values: dict[str, Any] = {name: value for name, value in saved.items() if name in known}
    return PolicyConfig(**{**values, "lora_targets": tuple(values["lora_targets"])})


@torch.no_grad()
def _fill(policy: Policy, checkpoint: Path) -> None:
    averaged = checkpoint / AVERAGED_WEIGHTS
    own = dict(policy.named_parameters())
    for name, tensor in load_file(averaged if averaged.is_file() else checkpoint / WEIGHTS).items():
        if name in own:
            own[name].copy_(tensor)
