"""A language model's update followed with fake tensors: the workload's real scoring, no memory."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor

from groupwise.plan.parts import Job
from groupwise.plan.trace import LiveBytes, fake_tensors, make_fake, traced_update
from groupwise.workloads.chat.completion import Completion
from groupwise.workloads.chat.engine_config import PolicyConfig, Sampling
from groupwise.workloads.chat.policy import Policy, make_policy
from groupwise.workloads.chat.scoring import score


def policy_like(model_config: Any, config: PolicyConfig, *, fake: bool = True) -> Policy:
    """A policy by its model's config alone: without memory, or with random weights."""
    kept = torch.float32 if config.lora_rank is None and config.dtype == "bfloat16" else getattr(torch, config.dtype)

    def make() -> Any:  # a policy changes its model's config
        return transformers.AutoModelForCausalLM.from_config(deepcopy(model_config), dtype=kept)

    if not fake:
        return make_policy(make(), config)
    with fake_tensors() as mode:
        model, frozen = make(), None
        if config.reference == "copy":  # made anew: fake tensors cannot be copied
            frozen = make().requires_grad_(False).eval()
    with LiveBytes():  # answers the check whether prompts can be shared
        if frozen is None:
            policy = make_policy(model, config)
        else:
            adapted = make_policy(model, replace(config, reference="none", path="plain"))
            policy = Policy(adapted.model, config, frozen)
            policy.train()
    make_fake(policy, mode)
    return policy


def scored_pass(
    policy: Policy, *, prompts: int, rows: int, prompt_tokens: int, completion_tokens: int
) -> Callable[[], Tensor]:
    """The loss of one pass whose rows are as long as they may be, dealt evenly to the prompts."""
    ids = tuple(range(1, completion_tokens + 1))
    size = policy.causal_lm.config.vocab_size
    known = torch.zeros(completion_tokens)
    said = [Completion(tuple(each % size for each in ids), known, known, stopped=True)] * rows
    asked = [[1 + nth % (size - 1) for nth in range(prompt_tokens)] for _ in range(prompts)]
    of_row = [row * prompts // rows for row in range(rows)]

    def one_pass() -> Tensor:
        scored = score(policy, asked, of_row, said, Sampling(), reference=policy.has_reference)
        ratio = (scored.logp - scored.logp.detach()).exp()
        return ratio.mean()

    return one_pass


def traced_chat(
    model_config: Any, config: PolicyConfig, job: Job, *, prompt_tokens: int, completion_tokens: int
) -> dict[str, int]:
    """Highest bytes of the update; at least two passes, so that gradients are there while another one runs."""
    policy, rows = policy_like(model_config, config), job.shape.rows_per_pass
    lengths = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    one = scored_pass(policy, prompts=job.prompts_in(rows), rows=rows, **lengths)
    copy = policy._reference[0]
    held = tuple(copy.parameters()) if copy is not None else ()
    return {"update": traced_update(policy, [one] * min(2, job.shape.passes), more=held)}
