"""Hidden states are computed once; registered questions about one image share a pass."""

from dataclasses import replace

import pytest
import torch
from tiny.llava import OPTIONS, llava_olmoe, sample

from groupwise.workloads.controller.model.adapters import LlavaAdapter
from groupwise.workloads.controller.model.executor import Executor
from groupwise.workloads.controller.policy.hidden_states import HiddenStateCache
from groupwise.workloads.controller.task import Question

EXECUTOR = Executor(LlavaAdapter(llava_olmoe()), OPTIONS)


@pytest.mark.parametrize("needed_first", [0, 2])
def test_registered_questions_share_one_pass_whichever_is_needed_first(needed_first, monkeypatch):
    image = sample(1)
    samples = [replace(image, name=f"{index}", question_ids=ids) for index, ids in enumerate([(3,), (4, 5), (6,)])]
    questions = [Question(each, "", ("",), {}) for each in samples]
    cache, passes, encode = HiddenStateCache(EXECUTOR), [], EXECUTOR.adapter.encode
    monkeypatch.setattr(
        EXECUTOR.adapter, "encode", lambda inputs, texts: passes.append(len(inputs)) or encode(inputs, texts)
    )
    cache.register(questions)
    zero = torch.zeros(1, dtype=torch.long)
    first, prefix = cache.latency_tokens([questions[needed_first]], zero, zero)
    assert prefix is None
    rest, _ = cache.latency_tokens(questions, zero.expand(3), zero.expand(3))
    assert passes == [9]
    assert torch.equal(first[0], rest[needed_first])
    again = HiddenStateCache(EXECUTOR)
    again.register(questions)
    assert torch.equal(again.latency_tokens(questions, zero.expand(3), zero.expand(3))[0], rest)
    unregistered = Question(replace(image, name="late", question_ids=(7,)), "", ("",), {})
    other_image = Question(sample(2), "", ("",), {})
    for question in (unregistered, other_image):  # runs alone, and its answers can continue
        _, prefix = cache.latency_tokens([question], zero, zero)
        assert prefix.computed.prompts.keys() == {(question.sample.name, tier) for tier in OPTIONS.crops_by_tier}


def test_cached_states_take_part_in_autograd():
    question, zero = Question(sample(3), "", ("",), {}), torch.zeros(1, dtype=torch.long)
    cache, weight = HiddenStateCache(EXECUTOR), torch.ones(32, requires_grad=True)
    tokens, _ = cache.latency_tokens([question], zero, zero)
    (tokens @ weight + cache.question_embeddings([question]) @ weight).sum().backward()
    assert weight.grad.abs().max() > 0
