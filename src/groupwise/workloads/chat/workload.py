"""ChatWorkload: completions as rollouts, their rewards, and their log-probs for the update."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.core.groups import content_hash
from groupwise.core.placement import RolloutRows
from groupwise.core.types import RewardTerms, Rollouts, Scores
from groupwise.dist.sharding import blocks_of
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
    """What `build` loads for a chat workload."""

    policy: LanguageModelPolicy
    tokenizer: Any
    training: PromptSet
    held_out: PromptSet | None
    functions: Mapping[str, RewardFunction]
    sampling: SamplingParams
    """As configured, with the stop tokens of the model and its tokenizer."""


class ChatWorkload(Workload):
    """A condition is a prompt, a rollout a completion of it, a decision a token."""

    policy: LanguageModelPolicy

    def __init__(self, components: ChatComponents, config: ChatConfig):
        from groupwise.workloads.chat.report import ChatReporter

        self.reporter = ChatReporter(self)
        self.components, self.config = components, config
        self.policy = components.policy
        self.num_conditions = len(components.training)
        if components.held_out is not None:
            self.num_held_out = min(len(components.held_out), config.eval.num_prompts or len(components.held_out))
        self.sampling, self.compute_dtype = components.sampling, config.policy.dtype
        self.row_limits = {"decode_rows": config.decode_rows, "eval_rows": config.decode_rows}

    def rollout(self, rows: RolloutRows) -> Rollouts:
        return self.sample_completions(
            self.components.training, rows, self.sampling, decode_rows=self.row_limits["decode_rows"]
        )

    def sample_completions(
        self, prompts: PromptSet, rows: RolloutRows, sampling: SamplingParams, *, decode_rows: int
    ) -> Rollouts:
        """One completion a row, of training or held-out prompts."""
        token_ids, prompt_of_row = _unique_prompts(prompts, rows.condition)
        completions = generate(self.policy, token_ids, prompt_of_row, rows, sampling, decode_rows=decode_rows)
        mask = completion_mask(completions)
        if self.config.mask_truncated:
            mask &= torch.tensor([completion.stopped for completion in completions])[:, None]
        return Rollouts(
            group_ids=prompts.group_ids[rows.condition],
            logp=pad_rows([completion.logps for completion in completions]),
            mask=mask,
            data={"condition": rows.condition, "completion": completions},
        )

    def expected_costs(self, conditions: Tensor) -> Tensor:
        """Tokens of a row, with the longest completion: how long completions will be is not known."""
        prompts = [len(self.components.training.ids[condition]) for condition in conditions.tolist()]
        return torch.tensor(prompts, dtype=torch.float64) + self.sampling.max_new_tokens

    def rewards(self, rollouts: Rollouts) -> RewardTerms:
        return self.reward_terms(self.components.training, rollouts)

    def reward_terms(self, prompts: PromptSet, rollouts: Rollouts) -> RewardTerms:
        """All reward functions on all rows, with the columns of their prompts."""
        rows = rollouts.data["condition"].tolist()
        completions: list[Completion] = rollouts.data["completion"]
        texts = self.decode_completions(completions)
        return call_rewards(
            self.components.functions,
            [prompts.reward_inputs[row] for row in rows],
            [[{"role": "assistant", "content": text}] for text in texts] if prompts.is_chat else texts,
            completion_ids=[list(completion.ids) for completion in completions],
            **{name: [column[row] for row in rows] for name, column in prompts.columns.items()},
        )

    def decode_completions(self, completions: Sequence[Completion]) -> list[str]:
        """Texts without special tokens, for rewards and people. They are never encoded again."""
        ids = [list(completion.ids) for completion in completions]
        texts: list[str] = self.components.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return texts

    def score(self, rollouts: Rollouts) -> Scores:
        token_ids, prompt_of_row = _unique_prompts(self.components.training, rollouts.data["condition"])
        return score(
            self.policy,
            token_ids,
            prompt_of_row,
            rollouts.data["completion"],
            self.components.sampling,
            width=rollouts.logp.shape[1],
            reference=self.policy.has_reference,
        )

    def passes(self, rollouts: Rollouts, rows_per_pass: int) -> Iterable[Tensor]:
        """Members of a group together, so that their prompt is computed once; limited by rows and by tokens."""
        conditions = rollouts.data["condition"].tolist()
        return split_into_passes(
            conditions,
            [len(self.components.training.ids[condition]) for condition in conditions],
            [len(completion) for completion in rollouts.data["completion"]],
            rows_per_pass=rows_per_pass,
            tokens_per_pass=self.config.tokens_per_pass,
        )

    def shard_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.policy.config.dtype == "bfloat16" else None

    def frozen_models(self) -> Sequence[tuple[nn.Module, Sequence[nn.Module]]]:
        reference = self.policy.reference_model
        return [] if reference is None else [(reference, blocks_of(reference))]

    def evaluate(self, rows: Tensor) -> Mapping[str, Tensor]:
        from groupwise.workloads.chat.evaluate import evaluate_prompts

        return evaluate_prompts(self, rows)

    def summarize_evaluation(self, columns: Mapping[str, Tensor]) -> Mapping[str, float]:
        from groupwise.workloads.chat.evaluate import evaluation_metrics

        return evaluation_metrics(columns)

    def checkpoint_files(self) -> Mapping[str, bytes]:
        """Conditions are prompts by index, so a run must not continue with other prompts: their number and hash."""
        content = content_hash(self.components.training.group_ids.numpy().tobytes())
        return {"questions.json": json.dumps({"questions": self.num_conditions, "content": content}).encode()}


def _unique_prompts(prompts: PromptSet, conditions: Tensor) -> tuple[list[tuple[int, ...]], list[int]]:
    """The token ids of the prompts in use, and for each row the index of its prompt among them."""
    used, prompt_of_row = conditions.unique(return_inverse=True)
    return [prompts.ids[condition] for condition in used.tolist()], prompt_of_row.tolist()
