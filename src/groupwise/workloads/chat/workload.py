"""The chat workload: rollouts are completions, rewards are asked by name, scores share the prompt."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from groupwise.core.groups import content_hash
from groupwise.core.placement import RolloutRows
from groupwise.core.types import RewardTerms, Rollouts, Scores
from groupwise.rewards.call import RewardFunction, call_rewards
from groupwise.workloads.base import Workload
from groupwise.workloads.chat.config import ChatConfig, SamplingParams
from groupwise.workloads.chat.data import PromptSet
from groupwise.workloads.chat.engine.generate import generate
from groupwise.workloads.chat.engine.policy import LanguageModelPolicy
from groupwise.workloads.chat.engine.sampler import Completion, completion_mask, pad_rows
from groupwise.workloads.chat.engine.score import score, split_into_passes


@dataclass(frozen=True)
class ChatComponents:
    """What a chat workload is made of."""

    policy: LanguageModelPolicy
    tokenizer: Any
    training: PromptSet
    held_out: PromptSet | None
    functions: Mapping[str, RewardFunction]
    sampling: SamplingParams
    """With the stop tokens of the model and its tokenizer."""


class ChatWorkload(Workload):
    """Questions, group_size answers to each, a reward, an update."""

    def __init__(self, parts: ChatComponents, config: ChatConfig):
        from groupwise.workloads.chat.report import ChatReporter

        self.reporter = ChatReporter(self)
        self.parts, self.config = parts, config
        self.policy = parts.policy
        self.num_conditions = len(parts.training)
        self.stage_rows = {"rollout": config.decode_rows, "evaluation": config.decode_rows}
        self.shrinkable = {"max_new_tokens": parts.sampling.max_new_tokens}

    @property
    def sampling(self) -> SamplingParams:
        """As set, unless completions had to become shorter."""
        return replace(self.parts.sampling, max_new_tokens=self.shrinkable["max_new_tokens"])

    def rollout(self, rows: RolloutRows) -> Rollouts:
        return self.complete(self.parts.training, rows, self.sampling, decode_rows=self.stage_rows["rollout"])

    def complete(
        self, prompts: PromptSet, rows: RolloutRows, sampling: SamplingParams, *, decode_rows: int
    ) -> Rollouts:
        """One completion a row, of training prompts or of others."""
        asked, of_row = _unique_prompts(prompts, rows.condition)
        said = generate(self.parts.policy, asked, of_row, rows, sampling, decode_rows=decode_rows)
        mask = completion_mask(said)
        if self.config.mask_truncated:
            mask &= torch.tensor([completion.stopped for completion in said])[:, None]
        return Rollouts(
            group_ids=prompts.group_ids[rows.condition],
            logp=pad_rows([completion.logps for completion in said]),
            mask=mask,
            data={"condition": rows.condition, "completion": said},
        )

    def rewards(self, rollouts: Rollouts) -> RewardTerms:
        return self.judged(self.parts.training, rollouts)

    def judged(self, prompts: PromptSet, rollouts: Rollouts) -> RewardTerms:
        """All reward functions on all rows, with the columns of their prompts."""
        rows = rollouts.data["condition"].tolist()
        said: list[Completion] = rollouts.data["completion"]
        texts = self.texts(said)
        return call_rewards(
            self.parts.functions,
            [prompts.reward_inputs[row] for row in rows],
            [[{"role": "assistant", "content": text}] for text in texts] if prompts.is_chat else texts,
            completion_ids=[list(completion.ids) for completion in said],
            **{name: [column[row] for row in rows] for name, column in prompts.columns.items()},
        )

    def texts(self, completions: Sequence[Completion]) -> list[str]:
        """What was said, without special tokens: for rewards and people, never to be encoded again."""
        ids = [list(completion.ids) for completion in completions]
        found: list[str] = self.parts.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return found

    def score(self, rollouts: Rollouts) -> Scores:
        asked, of_row = _unique_prompts(self.parts.training, rollouts.data["condition"])
        return score(
            self.parts.policy,
            asked,
            of_row,
            rollouts.data["completion"],
            self.parts.sampling,
            width=rollouts.logp.shape[1],
            reference=self.parts.policy.has_reference,
        )

    def passes(self, rollouts: Rollouts, rows_per_pass: int) -> Iterable[Tensor]:
        """Members of a group together, so that their prompt is computed once; cut by rows and by tokens."""
        of_row = rollouts.data["condition"].tolist()
        return split_into_passes(
            of_row,
            [len(self.parts.training.ids[row]) for row in of_row],
            [len(completion) for completion in rollouts.data["completion"]],
            rows_per_pass=rows_per_pass,
            tokens_per_pass=self.config.tokens_per_pass,
        )

    def evaluate(self) -> Mapping[str, float]:
        from groupwise.workloads.chat.evaluate import evaluation_metrics

        return evaluation_metrics(self)

    def checkpoint_files(self) -> Mapping[str, bytes]:
        """By number, a condition is a question: weights that were trained on others are not continued by mistake."""
        content = content_hash(self.parts.training.group_ids.numpy().tobytes())
        return {"questions.json": json.dumps({"questions": self.num_conditions, "content": content}).encode()}


def _unique_prompts(prompts: PromptSet, conditions: Tensor) -> tuple[list[tuple[int, ...]], list[int]]:
    """The prompts that some rows complete, and which of them each row does."""
    used, of_row = conditions.unique(return_inverse=True)
    return [prompts.ids[nth] for nth in used.tolist()], of_row.tolist()
