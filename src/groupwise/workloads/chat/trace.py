"""A language model's rollout and update followed with fake tensors: the workload's real code, no memory."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor

from groupwise.memory.stages import StepSpec
from groupwise.memory.trace import LiveByteCounter, fake_tensors, replace_with_fake, trace_peak, trace_update
from groupwise.workloads.chat.config import PolicyConfig, SamplingParams
from groupwise.workloads.chat.engine.generate import GenerationLoop
from groupwise.workloads.chat.engine.policy import LanguageModelPolicy, make_policy
from groupwise.workloads.chat.engine.sampler import Completion
from groupwise.workloads.chat.engine.scheduler import Scheduler
from groupwise.workloads.chat.engine.score import score
from groupwise.workloads.chat.memory import DRAWN_BYTES, ChatMemory


def fake_policy(model_config: Any, config: PolicyConfig, *, fake: bool = True) -> LanguageModelPolicy:
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
    with LiveByteCounter():  # answers the check whether prompts can be shared
        if frozen is None:
            policy = make_policy(model, config)
        else:
            adapted = make_policy(model, replace(config, reference="none", forward="plain"))
            policy = LanguageModelPolicy(adapted.model, config, frozen)
            policy.train()
    replace_with_fake(policy, mode)
    return policy


def scored_pass(
    policy: LanguageModelPolicy, *, prompts: int, rows: int, prompt_tokens: int, completion_tokens: int
) -> Callable[[], Tensor]:
    """The loss of one pass whose rows are as long as they may be, dealt evenly to the prompts."""
    ids = tuple(range(1, completion_tokens + 1))
    size = policy.causal_lm.config.vocab_size
    known = torch.zeros(completion_tokens)
    said = [Completion(tuple(each % size for each in ids), known, known, stopped=True)] * rows
    asked, of_row = _longest_prompts(policy, prompts, rows, prompt_tokens)

    def one_pass() -> Tensor:
        scored = score(policy, asked, of_row, said, SamplingParams(), reference=policy.has_reference)
        ratio = (scored.logp - scored.logp.detach()).exp()
        return ratio.mean()

    return one_pass


class _LongestCompletions(GenerationLoop):
    """All rows run to the last token."""

    def _evict_finished(self) -> None:
        """No row finishes: fake tokens have no values."""

    def decode_at(self, num_generated: int) -> None:
        """One decoding step of rows with so many tokens each."""
        for sequence in self.scheduler.running:
            sequence.num_generated = num_generated
        self._decode()


def followed_rollout(
    policy: LanguageModelPolicy, *, prompts: int, rows: int, prompt_tokens: int, completion_tokens: int
) -> Callable[[], None]:
    """All prompts enter, and decoding at the lengths at which a row's cache grows, up to the last."""
    asked, of_row = _longest_prompts(policy, prompts, rows, prompt_tokens)
    sampling = SamplingParams(max_new_tokens=completion_tokens)

    def act() -> None:
        with policy.sampling():
            uniforms = torch.zeros(rows, completion_tokens)
            loop = _LongestCompletions(policy, asked, Scheduler(of_row, rows), uniforms, sampling)
            loop._admit()
            for num_generated in range(1, completion_tokens):
                capacity = min((keys.shape[2] for keys, _ in loop.row_cache.layers.values()), default=0)
                if capacity < num_generated or num_generated == completion_tokens - 1:
                    loop.decode_at(num_generated)

    return act


def traced_rollout(policy: LanguageModelPolicy, act: Callable[[], None], drawn_tokens: int, *held: Tensor) -> int:
    """Highest bytes of a rollout, with AdamW's moments and all that is known of tokens once they are drawn."""
    trained = [weight for weight in policy.parameters() if weight.requires_grad]
    with fake_tensors():
        moments = [torch.empty_like(weight) for weight in trained for _ in range(2)]
        drawn = torch.empty(drawn_tokens, DRAWN_BYTES, dtype=torch.uint8)
    return trace_peak(act, *policy.parameters(), *policy.buffers(), *held, *moments, drawn)


def traced_chat(model_config: Any, config: PolicyConfig, job: StepSpec, memory: ChatMemory) -> dict[str, int]:
    """Highest bytes of a rollout of as many rows as decode together, and of the update's last pass."""
    policy, rows = fake_policy(model_config, config), job.shape.rows_per_pass
    lengths = {"prompt_tokens": memory.prompt_tokens, "completion_tokens": memory.completion_tokens}
    one = scored_pass(policy, prompts=job.prompts_in(rows), rows=rows, **lengths)
    copy = policy.reference_model
    held = tuple(copy.parameters()) if copy is not None else ()
    found = {"update": trace_update(policy, one, job, more=held)}
    if policy.shares_prefix:
        decoded = min(memory.decode_rows, job.shape.rollouts_per_rank)
        act = followed_rollout(policy, prompts=job.prompts_in(decoded), rows=decoded, **lengths)
        drawn = job.shape.rollouts_per_rank * memory.completion_tokens
        found = {"rollout": traced_rollout(policy, act, drawn, *held), **found}
    return found


def _longest_prompts(
    policy: LanguageModelPolicy, prompts: int, rows: int, prompt_tokens: int
) -> tuple[list[list[int]], list[int]]:
    """Prompts of so many tokens, and which one each row follows: dealt evenly."""
    size = policy.causal_lm.config.vocab_size
    asked = [[1 + nth % (size - 1) for nth in range(prompt_tokens)] for _ in range(prompts)]
    return asked, [row * prompts // rows for row in range(rows)]
