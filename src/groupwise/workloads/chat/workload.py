"""The chat workload: rollouts are completions, rewards are asked by name, scores share the prompt."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.placement import Rows
from groupwise.core.types import Rollouts, Scored, Terms
from groupwise.data.rows import counted
from groupwise.rewards.call import RewardFunction, judge
from groupwise.workloads.base import Report, Workload
from groupwise.workloads.chat.config import EMBEDDED, ChatConfig, Sampling
from groupwise.workloads.chat.data import Prompts
from groupwise.workloads.chat.engine.generate import generate
from groupwise.workloads.chat.engine.policy import Policy
from groupwise.workloads.chat.engine.sampler import Completion, padded, token_mask
from groupwise.workloads.chat.engine.score import cut_into_passes, score
from groupwise.workloads.chat.report import alarm_of, measures_of


@dataclass(frozen=True)
class ChatParts:
    """What a chat workload is made of."""

    policy: Policy
    tokenizer: Any
    training: Prompts
    held_out: Prompts | None
    functions: Mapping[str, RewardFunction]
    sampling: Sampling
    """With the stop tokens of the model and its tokenizer."""


class ChatWorkload(Workload):
    """Questions, group_size answers to each, a reward, an update."""

    def __init__(self, parts: ChatParts, config: ChatConfig):
        self.parts, self.config = parts, config
        self.policy = parts.policy
        self.conditions = len(parts.training)
        self.stage_rows = {"rollout": config.decode_rows, "evaluation": config.decode_rows}
        self.shrinkable = {"max_new_tokens": parts.sampling.max_new_tokens}

    @property
    def sampling(self) -> Sampling:
        """As set, unless completions had to become shorter."""
        return replace(self.parts.sampling, max_new_tokens=self.shrinkable["max_new_tokens"])

    def rollout(self, rows: Rows) -> Rollouts:
        return self.complete(self.parts.training, rows, self.sampling, decode_rows=self.stage_rows["rollout"])

    def complete(self, prompts: Prompts, rows: Rows, sampling: Sampling, *, decode_rows: int) -> Rollouts:
        """One completion a row, of training prompts or of others."""
        asked, of_row = _only_used(prompts, rows.condition)
        said = generate(self.parts.policy, asked, of_row, rows, sampling, decode_rows=decode_rows)
        mask = token_mask(said)
        if self.config.mask_truncated:
            mask &= torch.tensor([completion.stopped for completion in said])[:, None]
        return Rollouts(
            group_ids=prompts.group_ids[rows.condition],
            logp=padded([completion.logps for completion in said]),
            mask=mask,
            data={"condition": rows.condition, "completion": said},
        )

    def rewards(self, rollouts: Rollouts) -> Terms:
        return self.judged(self.parts.training, rollouts)

    def judged(self, prompts: Prompts, rollouts: Rollouts) -> Terms:
        """All reward functions on all rows, with the columns of their prompts."""
        rows = rollouts.data["condition"].tolist()
        said: list[Completion] = rollouts.data["completion"]
        texts = self.texts(said)
        return judge(
            self.parts.functions,
            [prompts.shown[row] for row in rows],
            [[{"role": "assistant", "content": text}] for text in texts] if prompts.is_dialogue else texts,
            completion_ids=[list(completion.ids) for completion in said],
            **{name: [column[row] for row in rows] for name, column in prompts.columns.items()},
        )

    def texts(self, completions: Sequence[Completion]) -> list[str]:
        """What was said, without special tokens: for rewards and people, never to be encoded again."""
        ids = [list(completion.ids) for completion in completions]
        found: list[str] = self.parts.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return found

    def score(self, rollouts: Rollouts) -> Scored:
        asked, of_row = _only_used(self.parts.training, rollouts.data["condition"])
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
        return cut_into_passes(
            of_row,
            [len(self.parts.training.ids[row]) for row in of_row],
            [len(completion) for completion in rollouts.data["completion"]],
            rows_per_pass=rows_per_pass,
            tokens_per_pass=self.config.tokens_per_pass,
        )

    def measures(self, rollouts: Rollouts, advantages: Tensor) -> Mapping[str, Tensor]:
        return measures_of(rollouts.data["completion"], advantages)

    def alarm(self, figures: Mapping[str, float]) -> str | None:
        told = alarm_of(figures, self.config, self.sampling)
        if told and self.config.when_all_truncated == "stop":
            raise UserError(told)
        return told

    def evaluate(self) -> Mapping[str, float]:
        from groupwise.workloads.chat.evaluate import quick_figures

        return quick_figures(self)

    def report(self) -> Report | None:
        from groupwise.workloads.chat.report import report

        return report(self)

    def describe(self, rollouts: Rollouts) -> Sequence[Mapping[str, Any]]:
        said: list[Completion] = rollouts.data["completion"]
        rows, prompts = rollouts.data["condition"].tolist(), self.parts.training
        answers = prompts.columns.get(self.config.judge.answer_column)
        return [
            {
                "prompt": self.parts.tokenizer.decode(list(prompts.ids[row])),
                "completion": text,
                **({"answer": answers[row]} if answers else {}),
                "tokens": len(completion),
                "truncated": not completion.stopped,
            }
            for row, text, completion in zip(rows, self.texts(said), said, strict=True)
        ]

    def files(self) -> Mapping[str, bytes]:
        """By number, a condition is a question: weights that were trained on others are not continued by mistake."""
        content = blake2b(self.parts.training.group_ids.numpy().tobytes(), digest_size=16)
        told = {"questions": self.conditions, "content": content.hexdigest()}
        return {"questions.json": json.dumps(told).encode()}

    def notes(self) -> Sequence[str]:
        why, stops = self.parts.policy.why_plain, self.parts.sampling.stop_ids
        named = ", ".join(map(repr, self.parts.tokenizer.convert_ids_to_tokens(list(stops))))
        told = [f"a completion ends with {named}, or after {self.parts.sampling.max_new_tokens} tokens"]
        if self.config.data.held_out == EMBEDDED != self.config.data.train:
            told.append(
                "evaluation asks the embedded sums, not questions like yours: give data.held_out, or '' for none"
            )
        for name, prompts in (("training", self.parts.training), ("held-out", self.parts.held_out)):
            if prompts is not None and prompts.dropped:
                told.append(f"{name} rows dropped: {counted(prompts.dropped)}; {len(prompts)} are left")
        return [*told, *([f"prompts are not shared within their group: {why}"] if why else [])]


def _only_used(prompts: Prompts, conditions: Tensor) -> tuple[list[tuple[int, ...]], list[int]]:
    """The prompts that some rows complete, and which of them each row does."""
    used, of_row = conditions.unique(return_inverse=True)
    return [prompts.ids[nth] for nth in used.tolist()], of_row.tolist()
