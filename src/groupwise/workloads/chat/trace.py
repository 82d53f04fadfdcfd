"""Peak memory of chat's rollout and update, traced with fake tensors through the engine's real code."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor

from groupwise.memory.stages import StepSpec
from groupwise.memory.trace import LiveByteCounter, TracedStep, fake_tensors, replace_with_fake, trace_step
from groupwise.workloads.chat.config import PolicyConfig, SamplingParams
from groupwise.workloads.chat.engine.generate import GenerationLoop
from groupwise.workloads.chat.engine.policy import LanguageModelPolicy, make_policy
from groupwise.workloads.chat.engine.sampler import Completion
from groupwise.workloads.chat.engine.scheduler import Scheduler
from groupwise.workloads.chat.engine.score import score
from groupwise.workloads.chat.memory import SAMPLED_TOKEN_BYTES, ChatMemory


def trace_chat(model_config: Any, config: PolicyConfig, memory: ChatMemory, spec: StepSpec) -> dict[str, int]:
    """Peak bytes of a rollout of as many rows as decode together, and of the update's last pass."""
    return trace_step(chat_step(fake_policy(model_config, config), memory, spec), spec)


def fake_policy(model_config: Any, config: PolicyConfig, *, fake: bool = True) -> LanguageModelPolicy:
    """A policy from its model's config alone: on fake tensors, or with random weights."""
    stored = torch.float32 if config.lora_rank is None and config.dtype == "bfloat16" else getattr(torch, config.dtype)

    def make() -> Any:  # a policy changes its model's config
        return transformers.AutoModelForCausalLM.from_config(deepcopy(model_config), dtype=stored)

    if not fake:
        return make_policy(make(), config)
    with fake_tensors() as mode:
        model, frozen = make(), None
        if config.reference == "copy":  # made anew: fake tensors cannot be copied
            frozen = make().requires_grad_(False).eval()
    with LiveByteCounter():  # supports the value-dependent check whether prompts can be shared
        if frozen is None:
            policy = make_policy(model, config)
        else:
            adapted = make_policy(model, replace(config, reference="none", forward="plain"))
            policy = LanguageModelPolicy(adapted.model, config, frozen)
            policy.train()
    replace_with_fake(policy, mode)
    return policy


def chat_step(policy: LanguageModelPolicy, memory: ChatMemory, spec: StepSpec) -> TracedStep:
    """Both stages with rows as long as they may be. Only rollouts with shared prompts can be traced."""
    rows, decode_rows = spec.shape.largest_pass, min(memory.decode_rows, spec.shape.rollouts_per_rank)
    reference = policy.reference_model
    with fake_tensors():
        sampled_tokens = spec.shape.rollouts_per_rank * memory.completion_tokens
        sampled = torch.empty(sampled_tokens, SAMPLED_TOKEN_BYTES, dtype=torch.uint8)
    return TracedStep(
        policy,
        _update_pass(policy, memory, rows, prompts=spec.conditions_in(rows)),
        _rollout(policy, memory, decode_rows, prompts=spec.conditions_in(decode_rows))
        if policy.shares_prefix
        else None,
        held=tuple(reference.parameters()) if reference is not None else (),
        held_in_rollout=(sampled,),
    )


def _update_pass(policy: LanguageModelPolicy, memory: ChatMemory, rows: int, *, prompts: int) -> Callable[[], Tensor]:
    vocabulary, unknown = policy.causal_lm.config.vocab_size, torch.zeros(memory.completion_tokens)
    tokens = tuple(index % vocabulary for index in range(1, memory.completion_tokens + 1))
    completions = [Completion(tokens, unknown, unknown, stopped=True)] * rows
    prompt_tokens, prompt_of_row = _longest_prompts(policy, memory, rows, prompts)

    def update_pass() -> Tensor:
        scores = score(
            policy, prompt_tokens, prompt_of_row, completions, SamplingParams(), reference=policy.has_reference
        )
        return (scores.logp - scores.logp.detach()).exp().mean()

    return update_pass


class _LongestCompletions(GenerationLoop):
    """All rows run to the last token."""

    def _evict_finished(self) -> None:
        """No row finishes: fake tokens have no values."""

    def decode_at(self, num_generated: int) -> None:
        """One decoding step of rows with so many tokens each."""
        for sequence in self.scheduler.running:
            sequence.num_generated = num_generated
        self._decode()


def _rollout(policy: LanguageModelPolicy, memory: ChatMemory, rows: int, *, prompts: int) -> Callable[[], None]:
    """Prefill of all prompts, then decoding at the lengths at which a row's cache grows, and at the last."""
    prompt_tokens, prompt_of_row = _longest_prompts(policy, memory, rows, prompts)
    sampling = SamplingParams(max_new_tokens=memory.completion_tokens)

    def rollout() -> None:
        with policy.sampling():
            uniforms = torch.zeros(rows, memory.completion_tokens)
            loop = _LongestCompletions(policy, prompt_tokens, Scheduler(prompt_of_row, rows), uniforms, sampling)
            loop._admit()
            for num_generated in range(1, memory.completion_tokens):
                capacity = min((keys.shape[2] for keys, _ in loop.row_cache.layers.values()), default=0)
                if capacity < num_generated or num_generated == memory.completion_tokens - 1:
                    loop.decode_at(num_generated)

    return rollout


def _longest_prompts(
    policy: LanguageModelPolicy, memory: ChatMemory, rows: int, prompts: int
) -> tuple[list[list[int]], list[int]]:
    """Prompts of the longest length, and the prompt of each row, in equal shares."""
    vocabulary = policy.causal_lm.config.vocab_size
    tokens = [[1 + index % (vocabulary - 1) for index in range(memory.prompt_tokens)] for _ in range(prompts)]
    return tokens, [row * prompts // rows for row in range(rows)]
