"""Batched equals alone, alone equals stock transformers, and the work is what the formula says."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from groupwise.core.errors import UserError
from groupwise.workloads.controller.model.adapters import LlavaAdapter, adapter_for, full_top_k
from groupwise.workloads.controller.model.answer_cache import AnswerCache, answer_with_cache
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor
from groupwise.workloads.controller.model.knobs import Knobs, WorkCounts, work_of_answer
from workloads.controller.tiny import IMAGE_TOKEN, OPTIONS, llava_olmoe, sample

MODELS = {
    "plain": llava_olmoe(),
    "renormalized": llava_olmoe(renormalize=True),
    "grouped heads": llava_olmoe(kv_heads=2),
}
EXECUTORS = {name: Executor(LlavaAdapter(model), OPTIONS) for name, model in MODELS.items()}
KNOBS = list(OPTIONS.all())
requests = st.lists(
    st.builds(AnswerRequest, st.integers(0, 5).map(sample), st.sampled_from(KNOBS)), min_size=1, max_size=8
)


@torch.no_grad()
def stock_answer(model, request, new_tokens):
    """One configuration with transformers' own forward passes, nothing remembered between tokens."""
    text, path = model.model.language_model, OPTIONS.path(request.knobs)
    blocks = text.layers
    crops = request.sample.crops[request.knobs.tier]
    ids = [IMAGE_TOKEN] * (4 * len(crops)) + list(request.sample.question)
    text.layers = nn.ModuleList([block for block, k in zip(blocks, path, strict=True) if k])
    try:
        for block, k in zip(blocks, path, strict=True):
            block.mlp.gate.top_k = k or OPTIONS.full_top_k
        first = None
        for _ in range(new_tokens):
            logits = model(input_ids=torch.tensor([ids]), pixel_values=crops, use_cache=False).logits[0, -1]
            first = logits if first is None else first
            ids.append(int(logits.argmax()))
    finally:
        text.layers = blocks
        for block in blocks:
            block.mlp.gate.top_k = OPTIONS.full_top_k
    return tuple(ids[-new_tokens:]), first


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=15)
@given(requests)
def test_a_batch_of_any_knobs_equals_stock_transformers_one_by_one(name, batch):
    answers, _ = EXECUTORS[name].answer(batch, max_new_tokens=4)
    for request, answer in zip(batch, answers, strict=True):
        tokens, logits = stock_answer(MODELS[name], request, 4)
        assert answer.tokens == tokens
        assert_close(answer.first_logits, logits, rtol=0, atol=1e-4)


@settings(max_examples=12)
@given(requests, st.integers(0, 38))
def test_batched_equals_alone_and_finished_rows_leave(batch, stop_token):
    together, _ = EXECUTORS["plain"].answer(batch, max_new_tokens=5, stop_token=stop_token)
    for request, answer in zip(batch, together, strict=True):
        (alone,), _ = EXECUTORS["plain"].answer([request], max_new_tokens=5, stop_token=stop_token)
        assert answer.tokens == alone.tokens
        assert_close(answer.first_logits, alone.first_logits, rtol=0, atol=1e-4)
        assert stop_token not in answer.tokens[:-1]
        assert len(answer.tokens) == 5 or answer.tokens[-1] == stop_token


@settings(max_examples=15)
@given(requests, st.integers(0, 10**6))
def test_the_latency_token_changes_nothing_and_its_pass_is_used_again(batch, seed):
    executor = EXECUTORS["plain"]
    heads = list({request.head: (request.sample, request.knobs.tier) for request in batch}.values())
    latency = torch.randn(32, generator=torch.Generator().manual_seed(seed))
    prefix = executor.prefix(heads, latency)
    with_it, work = executor.answer(batch, prefix=prefix, max_new_tokens=3)
    again, _ = executor.answer(batch, prefix=prefix, max_new_tokens=3)
    without, whole = executor.answer(batch, max_new_tokens=3)
    for one, other in zip(with_it, without, strict=True):
        assert one.tokens == other.tokens
        assert_close(one.first_logits, other.first_logits, rtol=0, atol=1e-5)
    assert [answer.tokens for answer in again] == [answer.tokens for answer in with_it]
    assert work.crops == 0
    assert work.block_rows < whole.block_rows


def test_the_latency_token_reads_the_prompt():
    executor, token = EXECUTORS["plain"], torch.randn(32)
    one, other = (executor.prefix([(sample(number), "low")], token) for number in (0, 1))
    (first,), (second,) = one.latency_tokens.values(), other.latency_tokens.values()
    assert first.shape == (3, 32)
    assert (first - second).abs().max() > 0.01


def test_the_latency_token_starts_as_the_mean_of_what_is_asked():
    executor, asked = EXECUTORS["plain"], sample(3)
    mean = executor.adapter.embed(torch.tensor(asked.question)).mean(0)
    by_default, given_it = executor.prefix([(asked, "low")]), executor.prefix([(asked, "low")], mean)
    other = executor.prefix([(asked, "low")], torch.zeros(32))
    for head, states in by_default.latency_tokens.items():
        assert_close(states, given_it.latency_tokens[head])
        assert (states - other.latency_tokens[head]).abs().max() > 0.01


@given(st.sampled_from(KNOBS), st.integers(0, 9))
def test_every_knob_acts_and_the_counted_work_is_the_formula(knobs, number):
    asked = sample(number)
    tokens = 4 * len(asked.crops[knobs.tier]) + len(asked.question)
    _, work = EXECUTORS["plain"].answer([AnswerRequest(asked, knobs)])
    assert work == work_of_answer(OPTIONS, knobs, tokens)


def test_shared_work_by_hand():
    # Two requests about one sample and tier, position 1, top-4 and top-2, all 8 blocks: block 0 is shared.
    asked = sample(1)
    pair = [AnswerRequest(asked, Knobs("low", 1, top_k, 8)) for top_k in (4, 2)]
    tokens = 4 * 2 + len(asked.question)
    _, work = EXECUTORS["plain"].answer(pair)
    # Block 0, six blocks of each request, and the last block, where only the last token goes to experts.
    pairs = tokens * (4 + 6 * 4 + 6 * 2) + (4 + 2)
    assert work == WorkCounts(crops=2, block_rows=1 + 7 + 7, expert_pairs=pairs)
    # Another tier of the same sample shares the overview; the same request again costs nothing.
    _, work = EXECUTORS["plain"].answer([pair[0], pair[0], AnswerRequest(asked, Knobs("medium", 1, 4, 8))])
    assert (work.crops, work.block_rows) == (1 + 1 + 2, 16)


def test_block_totals_are_the_same_for_every_insertion_position():
    for knobs in KNOBS:
        path = OPTIONS.path(knobs)
        assert sum(k > 0 for k in path) == knobs.blocks
        assert set(path[: knobs.insertion_position]) == {OPTIONS.full_top_k}
        assert set(path[knobs.insertion_position :]) <= {0, knobs.top_k}
    assert len(KNOBS) == 3 * 3 * 4 * 4


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        (Knobs("huge", 1, 4, 8), "tier is 'huge': this model offers low, medium, high"),
        (Knobs("low", 9, 4, 8), "insertion_position is 9"),
        (Knobs("low", 1, 5, 8), "top_k is 5"),
        (Knobs("low", 1, 4, 2), "blocks is 2: this model offers 5, 6, 7, 8"),
    ],
)
def test_knobs_outside_the_options_are_refused(knobs, says):
    with pytest.raises(UserError, match=says):
        EXECUTORS["plain"].answer([AnswerRequest(sample(0), knobs)])


def test_a_model_without_an_adapter_is_told():
    assert full_top_k(adapter_for(MODELS["plain"])) == 4
    with pytest.raises(UserError, match="Linear cannot be steered by knobs yet"):
        adapter_for(nn.Linear(1, 1))


def test_the_model_stays_itself_after_use_and_after_an_error():
    model = MODELS["plain"]
    before = model.config.text_config._attn_implementation
    with pytest.raises(RuntimeError):
        EXECUTORS["plain"].prefix([(sample(0), "low")], torch.zeros(7))
    EXECUTORS["plain"].answer([AnswerRequest(sample(0), OPTIONS.full)])
    assert model.config.text_config._attn_implementation == before
    stock_answer(model, AnswerRequest(sample(0), OPTIONS.full), 1)


def test_what_is_known_is_not_computed_again(tmp_path):
    batch = [AnswerRequest(sample(number), knobs) for number in range(2) for knobs in KNOBS[:3]]
    expected, _ = EXECUTORS["plain"].answer(batch, max_new_tokens=3)
    calls = []

    class Listening(Executor):
        def answer(self, requests, **settings):
            calls.append(len(requests))
            return super().answer(requests, **settings)

    executor = Listening(LlavaAdapter(MODELS["plain"]), OPTIONS)
    for known in (batch[:4], batch, batch):
        answers = AnswerCache("plain, 3 tokens", tmp_path / "answers.sqlite")
        found = answer_with_cache(executor, answers, known, max_new_tokens=3)
        assert found == [answer.tokens for answer in expected[: len(known)]]
    assert calls == [4, 2]
