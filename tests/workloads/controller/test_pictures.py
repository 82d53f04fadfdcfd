"""Many questions about one picture: looked at together, each sees what it would see alone."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from groupwise.workloads.controller.model.adapters import LlavaAdapter, QwenAdapter
from groupwise.workloads.controller.model.executor import Executor, image_key, latency_tokens_of_image
from groupwise.workloads.controller.policy.decide import HiddenStateCache
from groupwise.workloads.controller.task import Question
from workloads.controller import tiny, tiny_qwen

FAMILIES = {
    "llava": (Executor(LlavaAdapter(tiny.llava_olmoe()), tiny.OPTIONS), tiny.sample),
    "dense and grouped heads": (Executor(QwenAdapter(tiny_qwen.qwen()), tiny_qwen.OPTIONS), tiny_qwen.sample),
}
words = st.lists(st.integers(1, 30), min_size=1, max_size=6)


def about_one_picture(make, questions):
    first = make(1)
    return [replace(first, name=f"{nth}", question=tuple(asked)) for nth, asked in enumerate(questions)]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8)
@given(questions=st.lists(words, min_size=1, max_size=5), seed=st.integers(0, 10**6))
def test_together_equals_alone(family, questions, seed):
    executor, make = FAMILIES[family]
    samples, given_one = (
        about_one_picture(make, questions),
        torch.randn(32, generator=torch.Generator().manual_seed(seed)),
    )
    for token in (None, given_one):
        together = latency_tokens_of_image(executor, samples, token)
        for sample in samples:
            alone = executor.prefix([(sample, tier) for tier in executor.options.crops], token).latency_tokens
            for head, states in alone.items():
                assert_close(together[head], states, rtol=0, atol=1e-4)
        assert len(together) == len(samples) * len(executor.options.crops)


def test_the_picture_goes_through_the_vision_tower_once(monkeypatch):
    executor, make = FAMILIES["llava"]
    seen, tower = [], executor.adapter.model.get_image_features

    def counting(pixel_values, **more):
        seen.append(len(pixel_values))
        return tower(pixel_values=pixel_values, **more)

    monkeypatch.setattr(executor.adapter.model, "get_image_features", counting)
    latency_tokens_of_image(executor, about_one_picture(make, [[3], [4, 5], [6]]), torch.zeros(32))
    assert seen == [1 + 1 + 2 + 4]  # the overview, and the crops of three tiers


def test_equal_pictures_that_are_not_one_stay_apart():
    one, other = tiny.sample(1), tiny.sample(1)
    assert image_key(one) != image_key(other)
    assert image_key(one) == image_key(replace(one, question=(3,)))
    assert image_key(one) != image_key(replace(one, before=(3,)))


@pytest.mark.parametrize("met_first", [0, 2])
def test_introduced_questions_are_looked_at_once_whichever_is_met_first(met_first, monkeypatch):
    executor, make = FAMILIES["llava"]
    asked = [Question(each, "", ("",), {}) for each in about_one_picture(make, [[3], [4, 5], [6]])]
    alone = Question(make(2), "", ("",), {})
    features, passes = HiddenStateCache(executor), []
    encode = executor.adapter.encode
    monkeypatch.setattr(executor.adapter, "encode", lambda heads: passes.append(len(heads)) or encode(heads))
    features.introduce(asked)
    zero = torch.zeros(1, dtype=torch.long)
    first, prefix = features.latency_tokens([asked[met_first]], zero, zero)
    assert prefix is None
    rest, _ = features.latency_tokens(asked, zero.expand(3), zero.expand(3))
    assert passes == [9]
    assert torch.equal(first[0], rest[met_first])
    again = HiddenStateCache(executor)
    again.introduce(asked)
    assert torch.equal(again.latency_tokens(asked, zero.expand(3), zero.expand(3))[0], rest)
    late = Question(replace(asked[0].sample, name="late", question=(7,)), "", ("",), {})
    _, prefix = features.latency_tokens([late], zero, zero)  # about the same picture, but not introduced
    assert prefix is not None
    _, prefix = features.latency_tokens([alone], zero, zero)  # a stranger is looked at alone, and leaves its states
    assert prefix is not None
