"""Batched equals alone, alone equals stock transformers, and the work is what the formula says."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import qwen_vl
from tiny.llava import IMAGE_TOKEN, OPTIONS, llava_olmoe, sample
from torch import nn
from torch.testing import assert_close

from groupwise.core.errors import UserError
from groupwise.workloads.controller.model.adapters import LlavaAdapter, QwenAdapter, adapter_for, full_top_k
from groupwise.workloads.controller.model.answer_cache import AnswerCache, answer_with_cache
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor, PrefixItem, PrefixStates, image_key
from groupwise.workloads.controller.model.knobs import Knobs, WorkCounts, work_of_answer

MODELS = {
    "plain": llava_olmoe(),
    "renormalized": llava_olmoe(renormalize=True),
    "grouped heads": llava_olmoe(kv_heads=2),
}
EXECUTORS = {name: Executor(LlavaAdapter(model), OPTIONS) for name, model in MODELS.items()}
KNOBS = list(OPTIONS.configurations())
requests = st.lists(
    st.builds(AnswerRequest, st.integers(0, 5).map(sample), st.sampled_from(KNOBS)), min_size=1, max_size=8
)


@torch.no_grad()
def stock_answer(model, request, new_tokens):
    """One configuration with transformers' own forward passes, without a cache."""
    text, path = model.model.language_model, OPTIONS.block_path(request.knobs)
    blocks = text.layers
    crops = request.sample.crops_by_tier[request.knobs.tier]
    ids = [IMAGE_TOKEN] * (4 * len(crops)) + list(request.sample.question_ids)
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
def test_batched_equals_alone_and_finished_rows_stop(batch, stop_token):
    together, _ = EXECUTORS["plain"].answer(batch, max_new_tokens=5, stop_token=stop_token)
    for request, answer in zip(batch, together, strict=True):
        (alone,), _ = EXECUTORS["plain"].answer([request], max_new_tokens=5, stop_token=stop_token)
        assert answer.tokens == alone.tokens
        assert_close(answer.first_logits, alone.first_logits, rtol=0, atol=1e-4)
        assert stop_token not in answer.tokens[:-1]
        assert len(answer.tokens) == 5 or answer.tokens[-1] == stop_token


def prefix_items(batch):
    """One item for each (sample, tier)."""
    items = {request.prompt_key: PrefixItem([request.sample], request.knobs.tier) for request in batch}
    return list(items.values())


@settings(max_examples=15)
@given(requests, st.integers(0, 10**6))
def test_the_latency_token_changes_no_answer_and_answers_continue_from_its_pass(batch, seed):
    executor = EXECUTORS["plain"]
    latency = torch.randn(32, generator=torch.Generator().manual_seed(seed))
    prefix = executor.run_prefix(prefix_items(batch), latency)
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
    one, other = (executor.run_prefix([PrefixItem([sample(number)], "low")], token) for number in (0, 1))
    (first,), (second,) = one.latency_tokens.values(), other.latency_tokens.values()
    assert list(first) == list(second) == [1, 2, 3]
    for position, state in first.items():
        assert state.shape == (32,)
        assert (state - second[position]).abs().max() > 0.01


def test_the_latency_token_starts_as_the_mean_of_the_question():
    executor, asked = EXECUTORS["plain"], sample(3)
    mean = executor.adapter.embed(torch.tensor(asked.question_ids)).mean(0)
    key, items = (asked.name, "low"), [PrefixItem([asked], "low")]
    default, given_it, other = (executor.run_prefix(items, token) for token in (None, mean, torch.zeros(32)))
    for position, state in default.latency_tokens[key].items():
        assert_close(state, given_it.latency_tokens[key][position])
        assert (state - other.latency_tokens[key][position]).abs().max() > 0.01


def test_answers_continue_from_several_passes_as_from_one():
    executor = EXECUTORS["plain"]
    batch = [AnswerRequest(sample(number), knobs) for number in range(3) for knobs in KNOBS[::40]]
    together, _ = executor.answer(batch, prefix=executor.run_prefix(prefix_items(batch)), max_new_tokens=3)
    merged = PrefixStates.merge([executor.run_prefix([item]) for item in prefix_items(batch)])
    apart, work = executor.answer(batch, prefix=merged, max_new_tokens=3)
    assert [answer.tokens for answer in apart] == [answer.tokens for answer in together]
    assert work.crops == 0


@given(st.sampled_from(KNOBS), st.integers(0, 9))
def test_every_knob_acts_and_the_counted_work_is_the_formula(knobs, number):
    asked = sample(number)
    tokens = 4 * len(asked.crops_by_tier[knobs.tier]) + len(asked.question_ids)
    _, work = EXECUTORS["plain"].answer([AnswerRequest(asked, knobs)])
    assert work == work_of_answer(OPTIONS, knobs, tokens)


def test_shared_work_by_hand():
    # Two requests about one sample and tier, position 1, top-4 and top-2, all 8 blocks: block 0 is shared.
    asked = sample(1)
    pair = [AnswerRequest(asked, Knobs("low", 1, top_k, 8)) for top_k in (4, 2)]
    tokens = 4 * 2 + len(asked.question_ids)
    _, work = EXECUTORS["plain"].answer(pair)
    # Block 0, six blocks of each request, and the last block, where only the last token goes to experts.
    pairs = tokens * (4 + 6 * 4 + 6 * 2) + (4 + 2)
    assert work == WorkCounts(crops=2, block_rows=1 + 7 + 7, expert_pairs=pairs)
    # Another tier of the same sample shares the overview; the same request again costs nothing.
    _, work = EXECUTORS["plain"].answer([pair[0], pair[0], AnswerRequest(asked, Knobs("medium", 1, 4, 8))])
    assert (work.crops, work.block_rows) == (1 + 1 + 2, 16)


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


def test_a_model_without_an_adapter_is_refused():
    assert full_top_k(adapter_for(MODELS["plain"])) == 4
    with pytest.raises(UserError, match="Linear has no adapter"):
        adapter_for(nn.Linear(1, 1))


def test_the_model_is_unchanged_after_use_and_after_an_error():
    model = MODELS["plain"]
    before = model.config.text_config._attn_implementation

    def fail(*_):
        raise RuntimeError("inside a block")

    hook = model.model.language_model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="inside a block"):
        EXECUTORS["plain"].run_prefix([PrefixItem([sample(0)], "low")])
    hook.remove()
    assert model.config.text_config._attn_implementation == before
    EXECUTORS["plain"].answer([AnswerRequest(sample(0), OPTIONS.full)])
    assert model.config.text_config._attn_implementation == before
    stock_answer(model, AnswerRequest(sample(0), OPTIONS.full), 1)


def test_threads_get_the_answers_of_one_thread_and_leave_the_model_as_it_was():
    """Some threads use the executor while others use the model's own forward."""
    model, executor = MODELS["plain"], EXECUTORS["plain"]
    text_config = model.config.text_config
    before = dict(vars(text_config))
    batches = [[AnswerRequest(sample(number), knobs)] for number in range(6) for knobs in KNOBS[:: len(KNOBS) // 4]]
    stock = [AnswerRequest(sample(number), OPTIONS.full) for number in range(4)]

    def answer(batch):
        prefix = executor.run_prefix(prefix_items(batch))
        return [one.tokens for one in executor.answer(batch, prefix=prefix, max_new_tokens=3)[0]]

    def forward(request):
        ids = [IMAGE_TOKEN] * (4 * len(request.sample.crops_by_tier["high"])) + list(request.sample.question_ids)
        with torch.no_grad():
            return model(input_ids=torch.tensor([ids]), pixel_values=request.sample.crops_by_tier["high"]).logits[0, -1]

    alone, stock_alone = [answer(batch) for batch in batches], [forward(request) for request in stock]
    with ThreadPoolExecutor(6) as threads:
        together = [threads.submit(answer, batch) for _ in range(3) for batch in batches]
        stock_together = [threads.submit(forward, request) for _ in range(6) for request in stock]
        assert [future.result() for future in together] == 3 * alone
        assert_close([future.result() for future in stock_together], 6 * stock_alone, rtol=0, atol=0)
    assert vars(text_config) == before
    assert all(block.self_attn.config is text_config for block in model.model.language_model.layers)


def test_the_executor_uses_the_weights_that_the_model_has_now():
    model = llava_olmoe()
    executor, request = Executor(LlavaAdapter(model), OPTIONS), AnswerRequest(sample(0), OPTIONS.full)
    ((before,), _), blocks = executor.answer([request]), model.model.language_model.layers
    with torch.no_grad():
        for weight in blocks.parameters():
            weight.mul_(1.5)
    (after,), _ = executor.answer([request])
    _, logits = stock_answer(model, request, 1)
    assert_close(after.first_logits, logits, rtol=0, atol=1e-4)
    assert (after.first_logits - before.first_logits).abs().max() > 0.01


def test_cached_answers_are_not_computed_again(tmp_path):
    batch = [AnswerRequest(sample(number), knobs) for number in range(2) for knobs in KNOBS[:3]]
    expected, _ = EXECUTORS["plain"].answer(batch, max_new_tokens=3)
    calls = []

    class Listening(Executor):
        def answer(self, requests, **settings):
            calls.append(len(requests))
            return super().answer(requests, **settings)

    executor = Listening(LlavaAdapter(MODELS["plain"]), OPTIONS)
    for known in (batch[:4], batch, batch):
        cache = AnswerCache("plain, 3 tokens", tmp_path / "answers.sqlite")
        tokens = answer_with_cache(executor, cache, known, max_new_tokens=3)
        assert tokens == [answer.tokens for answer in expected[: len(known)]]
    assert calls == [4, 2]


FAMILIES = {
    "llava": (EXECUTORS["plain"], sample),
    "dense and grouped heads": (Executor(QwenAdapter(qwen_vl.qwen()), qwen_vl.OPTIONS), qwen_vl.sample),
}


def samples_of_one_image(make, questions):
    image = make(1)
    return [replace(image, name=f"{index}", question_ids=tuple(ids)) for index, ids in enumerate(questions)]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8)
@given(
    questions=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=5),
    seed=st.integers(0, 10**6),
)
def test_questions_that_share_an_image_get_the_latency_tokens_of_each_alone(family, questions, seed):
    executor, make = FAMILIES[family]
    samples, tiers = samples_of_one_image(make, questions), executor.options.crops_by_tier
    given_one = torch.randn(32, generator=torch.Generator().manual_seed(seed))
    for token in (None, given_one):
        together = executor.run_prefix([PrefixItem(samples, tier) for tier in tiers], token).latency_tokens
        for one in samples:
            alone = executor.run_prefix([PrefixItem([one], tier) for tier in tiers], token).latency_tokens
            for key, states in alone.items():
                assert together[key].keys() == states.keys()
                for position, state in states.items():
                    assert_close(together[key][position], state, rtol=0, atol=1e-4)
        assert len(together) == len(samples) * len(tiers)


@settings(max_examples=5)
@given(st.integers(1, 3))
def test_shared_and_single_items_mix_and_stop_at_their_own_position(until):
    executor = EXECUTORS["plain"]
    shared, single = samples_of_one_image(sample, [[3], [4, 5]]), sample(2)
    items = [PrefixItem(shared, "high", until=3), PrefixItem([single], "low", until=until)]
    mixed = executor.run_prefix(items).latency_tokens
    apart = {key: states for item in items for key, states in executor.run_prefix([item]).latency_tokens.items()}
    assert list(mixed[single.name, "low"]) == list(range(1, until + 1))
    for key, states in apart.items():
        assert mixed[key].keys() == states.keys()
        for position, state in states.items():
            assert_close(mixed[key][position], state, rtol=0, atol=1e-5)


def test_answers_to_questions_that_shared_an_image_continue_from_the_encoded_prompt():
    executor, samples = EXECUTORS["plain"], samples_of_one_image(sample, [[3], [4, 5]])
    prefix = executor.run_prefix([PrefixItem(samples, "medium")])
    batch = [AnswerRequest(one, Knobs("medium", 2, 3, 6)) for one in samples]
    answers, work = executor.answer(batch, prefix=prefix, max_new_tokens=3)
    expected, _ = executor.answer(batch, max_new_tokens=3)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert work.crops == 0


def test_a_shared_image_goes_through_the_vision_tower_once(monkeypatch):
    executor, make = FAMILIES["llava"]
    crops, tower = [], executor.adapter.model.get_image_features

    def counting(pixel_values, **more):
        crops.append(len(pixel_values))
        return tower(pixel_values=pixel_values, **more)

    monkeypatch.setattr(executor.adapter.model, "get_image_features", counting)
    samples = samples_of_one_image(make, [[3], [4, 5], [6]])
    executor.run_prefix([PrefixItem(samples, tier) for tier in OPTIONS.crops_by_tier], torch.zeros(32))
    assert crops == [1 + 1 + 2 + 4]  # the overview, and the crops of three tiers


def test_equal_images_that_are_not_one_object_stay_apart():
    one, other = sample(1), sample(1)
    assert image_key(one) != image_key(other)
    assert image_key(one) == image_key(replace(one, question_ids=(3,)))
    assert image_key(one) != image_key(replace(one, prefix_ids=(3,)))
    with pytest.raises(AssertionError, match="share their image"):
        EXECUTORS["plain"].run_prefix([PrefixItem([one, other], "low")])
