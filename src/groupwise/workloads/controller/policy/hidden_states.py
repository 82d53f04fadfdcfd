"""HiddenStateCache: what the controller reads of a question. It is cached, since nothing that is trained changes it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from groupwise.workloads.controller.model.adapters.base import overview_pixels
from groupwise.workloads.controller.model.executor import (
    Executor,
    PrefixItem,
    PrefixStates,
    PromptKey,
    image_key,
)
from groupwise.workloads.controller.task import Question


class HiddenStateCache:
    """Question embeddings and latency tokens of one frozen model.

    The latency token's own embedding is not trained. That would need gradients through the model's first blocks for
    every rollout, and nothing could be cached. The budget reaches stage two through the budget encoder instead.
    """

    def __init__(self, executor: Executor):
        self.executor = executor
        self.width: int = executor.adapter.text_config.hidden_size
        self._embeddings: dict[tuple[int, ...], Float[Tensor, " width"]] = {}
        self._latency_tokens: dict[PromptKey, Float[Tensor, "positions width"]] = {}
        # Both keep questions alive: an image is identified by the object of its crops.
        self._by_image: dict[Hashable, list[Question]] = {}
        self._overviews: dict[Hashable, tuple[Question, Float[Tensor, " pixels"]]] = {}

    def register(self, questions: Sequence[Question]) -> None:
        """Let questions about one image share a pass: the first one that is needed computes all of them.

        For questions whose answers are precomputed: answers do not continue from a shared pass.
        """
        by_image: dict[Hashable, list[Question]] = {}
        for question in questions:
            by_image.setdefault(image_key(question.sample), []).append(question)
        self._by_image = by_image | self._by_image

    @torch.no_grad()
    def question_embeddings(self, questions: Sequence[Question]) -> Float[Tensor, "rows width"]:
        """The mean embedding of each question's tokens: known before a tier is chosen."""
        new = {question.sample.question_ids for question in questions} - self._embeddings.keys()
        if new:
            embed = self.executor.adapter.embed
            means = torch.stack([embed(torch.tensor(ids)).mean(0, dtype=torch.float32) for ids in new]).cpu()
            self._embeddings |= dict(zip(new, means.unbind(), strict=True))
        return torch.stack([self._embeddings[question.sample.question_ids] for question in questions])

    def overviews(self, questions: Sequence[Question]) -> Float[Tensor, "rows pixels"]:
        """Each question's image in few pixels: known before a tier is chosen."""
        for question in questions:
            key = image_key(question.sample)
            if key not in self._overviews:
                self._overviews[key] = question, overview_pixels(question.sample)
        return torch.stack([self._overviews[image_key(question.sample)][1] for question in questions])

    def latency_tokens(
        self, questions: Sequence[Question], tiers: Int64[Tensor, " rows"], positions: Int64[Tensor, " rows"]
    ) -> tuple[Float[Tensor, "rows width"], PrefixStates | None]:
        """The hidden state of each row's latency token, by the indices of its tier and insertion position.

        Also returns the states of new questions that were not registered, for their answers to continue from. All tiers
        of a question run in one pass, with no other questions than those registered for its image. So a state is
        bit-identical wherever and whenever it is computed, also after a resume.
        """
        tier_names = list(self.executor.options.crops_by_tier)
        passes = []
        for question in {question.sample.name: question for question in questions}.values():
            if (question.sample.name, tier_names[0]) in self._latency_tokens:
                continue
            samples = [other.sample for other in self._by_image.get(image_key(question.sample), [])]
            is_registered = question.sample.name in {sample.name for sample in samples}
            samples = samples if is_registered else [question.sample]
            states = self.executor.run_prefix([PrefixItem(samples, tier) for tier in tier_names])
            tokens_by_key = self._stacked_tokens(states)
            if not is_registered:
                passes.append(states)
            del states
            # Copied only now: long-lived tensors among the large ones of a pass would fragment the heap. A copy made
            # outside inference mode can take part in autograd.
            on_host = torch.stack(list(tokens_by_key.values())).cpu().float()
            self._latency_tokens |= {key: tokens.clone() for key, tokens in zip(tokens_by_key, on_host, strict=True)}
        rows = zip(questions, tiers.tolist(), positions.tolist(), strict=True)
        tokens = [
            self._latency_tokens[question.sample.name, tier_names[tier]][position] for question, tier, position in rows
        ]
        return torch.stack(tokens), PrefixStates.merge(passes) if passes else None

    def _stacked_tokens(self, states: PrefixStates) -> dict[PromptKey, Float[Tensor, "positions width"]]:
        positions = self.executor.options.insertion_positions
        return {
            key: torch.stack([by_position[position] for position in positions])
            for key, by_position in states.latency_tokens.items()
        }
