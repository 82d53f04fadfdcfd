"""What the controller sees of a question: remembered, because nothing that is trained changes it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from groupwise.workloads.controller.executor import Executor, Head, Prefix
from groupwise.workloads.controller.pictures import latency_tokens_by_picture, picture_of
from groupwise.workloads.controller.task import Question


class Features:
    """Prompt embeddings and latency tokens of one frozen model.

    The latency token's own embedding is not trained. That would need gradients through the model's first blocks for
    every rollout, and no state could be remembered; the budget, which it carries in other designs, reaches the second
    stage through the budget encoder instead.
    """

    def __init__(self, executor: Executor):
        self.executor = executor
        self._prompts: dict[tuple[int, ...], Float[Tensor, " width"]] = {}
        self._tokens: dict[Head, Float[Tensor, "positions width"]] = {}
        self._pictures: dict[Hashable, list[Question]] = {}  # holds the questions: a picture is known by its object
        self.width: int = executor.adapter.text_config.hidden_size

    def introduce(self, questions: Sequence[Question]) -> None:
        """Questions that will be met, all of them: those about one picture are looked at together, when one is met.

        For where answers are known beforehand: nothing is left of such a look for them to go on from.
        """
        together: dict[Hashable, list[Question]] = {}
        for question in questions:
            together.setdefault(picture_of(question.sample), []).append(question)
        self._pictures = together | self._pictures

    def prompts(self, questions: Sequence[Question]) -> Float[Tensor, "rows width"]:
        """The mean embedding of each question's tokens: known before any tier is chosen."""
        for question in questions:
            tokens = question.sample.question
            if tokens not in self._prompts:
                self._prompts[tokens] = self.embed(torch.tensor(tokens))
        return torch.stack([self._prompts[question.sample.question] for question in questions])

    def latency_tokens(
        self, questions: Sequence[Question], tiers: Int64[Tensor, " rows"], positions: Int64[Tensor, " rows"]
    ) -> tuple[Float[Tensor, "rows width"], Prefix | None]:
        """The hidden state of each row's latency token at its insertion position.

        Comes with what the model has computed for the questions that were new, and were not introduced. All tiers of a
        question run together, and no other question but those introduced with it: a state is the same bit by bit
        wherever and whenever it is computed, also after a resume.
        """
        tiers_by_number = list(self.executor.options.crops)
        passes = []
        for question in {each.sample.name: each for each in questions}.values():
            if (question.sample.name, tiers_by_number[0]) in self._tokens:
                continue
            samples = [each.sample for each in self._pictures.get(picture_of(question.sample), [])]
            if question.sample.name in {sample.name for sample in samples}:
                found = latency_tokens_by_picture(self.executor, samples)
            else:
                passes.append(self.executor.prefix([(question.sample, tier) for tier in tiers_by_number]))
                found = passes[-1].latency_tokens
            # a copy made here takes part in autograd; what inference mode leaves does not
            self._tokens |= {head: states.cpu().float().clone() for head, states in found.items()}
        rows = zip(questions, tiers.tolist(), positions.tolist(), strict=True)
        states = [self._tokens[each.sample.name, tiers_by_number[tier]][nth] for each, tier, nth in rows]
        return torch.stack(states), _join(passes) if passes else None

    @torch.no_grad()
    def embed(self, tokens: Int64[Tensor, " tokens"]) -> Float[Tensor, " width"]:
        """The mean embedding of these tokens."""
        return self.executor.adapter.embed(tokens).float().mean(0).cpu()


def _join(passes: Sequence[Prefix]) -> Prefix:
    """Several passes as one, for answers that go on from them together."""
    tokens = {head: states for each in passes for head, states in each.latency_tokens.items()}
    first = passes[0].known
    stores = [entry.name for entry in fields(first) if isinstance(getattr(first, entry.name), dict)]
    joined: dict[str, Any] = {
        name: {key: kept for each in passes for key, kept in getattr(each.known, name).items()} for name in stores
    }
    return Prefix(tokens, replace(first, **joined))
