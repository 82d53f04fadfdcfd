"""What each input is worth to a trained controller: its choices when one of them is another picture's, or zeros."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from groupwise.workloads.controller.evaluate.exact import EvaluationSet
from groupwise.workloads.controller.model.executor import PrefixStates
from groupwise.workloads.controller.policy.decide import Controller
from groupwise.workloads.controller.policy.hidden_states import HiddenStateCache
from groupwise.workloads.controller.task import Question


class _DelegatingStates(HiddenStateCache):
    """What another cache gives; subclasses change one of its methods."""

    def __init__(self, cache: HiddenStateCache):
        super().__init__(cache.executor)
        self._cache = cache

    def question_embeddings(self, questions: Sequence[Question]) -> Float[Tensor, "rows width"]:
        return self._cache.question_embeddings(questions)

    def overviews(self, questions: Sequence[Question]) -> Float[Tensor, "rows pixels"]:
        return self._cache.overviews(questions)

    def latency_tokens(
        self, questions: Sequence[Question], tiers: Int64[Tensor, " rows"], positions: Int64[Tensor, " rows"]
    ) -> tuple[Float[Tensor, "rows width"], PrefixStates | None]:
        return self._cache.latency_tokens(questions, tiers, positions)


class SwappedStates(_DelegatingStates):
    """One input of each question is that of its partner; without partners it is all zeros."""

    def __init__(self, cache: HiddenStateCache, swapped: str, partners: Mapping[str, Question] | None):
        super().__init__(cache)
        self._swapped, self._partners = swapped, partners

    def question_embeddings(self, questions: Sequence[Question]) -> Float[Tensor, "rows width"]:
        return self._substitute("question", super().question_embeddings, questions)

    def overviews(self, questions: Sequence[Question]) -> Float[Tensor, "rows pixels"]:
        return self._substitute("overview", super().overviews, questions)

    def latency_tokens(
        self, questions: Sequence[Question], tiers: Int64[Tensor, " rows"], positions: Int64[Tensor, " rows"]
    ) -> tuple[Float[Tensor, "rows width"], PrefixStates | None]:
        def tokens(asked: Sequence[Question]) -> Float[Tensor, "rows width"]:
            return self._cache.latency_tokens(asked, tiers, positions)[0]

        return self._substitute("latency_token", tokens, questions), None

    def _substitute(
        self, name: str, read: Callable[[Sequence[Question]], Tensor], questions: Sequence[Question]
    ) -> Tensor:
        if name != self._swapped:
            return read(questions)
        if self._partners is None:
            return torch.zeros_like(read(questions))
        return read([self._partners[question.sample.name] for question in questions])


def ablated_controllers(controller: Controller, test_set: EvaluationSet) -> dict[str, Controller]:
    """The controller with one input replaced, by what is replaced."""
    partners = partners_of_other_pictures(test_set)
    states = partial(SwappedStates, controller.hidden_states)
    replaced: dict[str, HiddenStateCache] = {}
    for name in ("question", "overview", "latency_token"):
        if name == "overview" and not controller.policy.sees_overview:
            continue
        if partners:
            replaced[f"{name}_swapped"] = states(name, partners)
        replaced[f"{name}_zeros"] = states(name, None)
    return {name: Controller(controller.policy, cache, controller.device) for name, cache in replaced.items()}


def partners_of_other_pictures(test_set: EvaluationSet, seed: int = 0) -> dict[str, Question]:
    """For each sample a random question about another picture, always the same picture for one; empty if there is one
    picture only."""
    by_picture: dict[str, list[Question]] = {}
    for picture, question in zip(test_set.pictures, test_set.questions, strict=True):
        by_picture.setdefault(picture, []).append(question)
    if len(by_picture) < 2:
        return {}
    source = random.Random(seed)
    order = source.sample(list(by_picture), len(by_picture))
    other = dict(zip(order, [*order[1:], order[0]], strict=True))
    return {
        question.sample.name: source.choice(by_picture[other[picture]])
        for picture, questions in by_picture.items()
        for question in questions
    }
