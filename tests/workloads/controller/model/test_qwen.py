"""Qwen3-VL under the executor: batched equals stock transformers one by one, and the work is what the formula says."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny.qwen_vl import MERGE, OPTIONS, SIDE, patches_of, qwen, sample, stock_answer
from torch.testing import assert_close
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from groupwise.core.errors import UserError
from groupwise.workloads.controller.model.adapters import QwenAdapter, adapter_for, dense_blocks, full_top_k
from groupwise.workloads.controller.model.adapters.experts import RouterRule
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor, PrefixItem
from groupwise.workloads.controller.model.knobs import Knobs, WorkCounts, work_of_answer

MODEL = qwen()
ADAPTER = QwenAdapter(MODEL)
EXECUTOR = Executor(ADAPTER, OPTIONS)
KNOBS = list(OPTIONS.configurations())
requests = st.lists(
    st.builds(AnswerRequest, st.integers(0, 5).map(sample), st.sampled_from(KNOBS)), min_size=1, max_size=8
)


@settings(max_examples=12)
@given(requests)
def test_a_batch_of_any_knobs_equals_stock_transformers_one_by_one(batch):
    answers, _ = EXECUTOR.answer(batch, max_new_tokens=4)
    for request, answer in zip(batch, answers, strict=True):
        tokens, logits = stock_answer(MODEL, OPTIONS, request, 4)
        assert answer.tokens == tokens
        assert_close(answer.first_logits, logits, rtol=0, atol=1e-4)


@settings(max_examples=8)
@given(requests, st.integers(0, 38), st.integers(0, 10**6))
def test_batched_equals_alone_with_and_without_the_latency_token(batch, stop_token, seed):
    items = {request.prompt_key: PrefixItem([request.sample], request.knobs.tier) for request in batch}
    latency_token = torch.randn(32, generator=torch.Generator().manual_seed(seed))
    prefix = EXECUTOR.run_prefix(list(items.values()), latency_token)
    together, work = EXECUTOR.answer(batch, prefix=prefix, max_new_tokens=4, stop_token=stop_token)
    for request, answer in zip(batch, together, strict=True):
        (alone,), _ = EXECUTOR.answer([request], max_new_tokens=4, stop_token=stop_token)
        assert answer.tokens == alone.tokens
        assert_close(answer.first_logits, alone.first_logits, rtol=0, atol=1e-4)
    assert (work.crops, work.patches) == (0, 0)


def test_the_latency_token_is_the_next_word_after_the_prompt():
    """Its state after a block is what stock transformers computes for a word with that embedding, put last."""
    asked, word = sample(2), 7
    latency = MODEL.get_input_embeddings().weight[word].detach()
    prefix = EXECUTOR.run_prefix([PrefixItem([asked], "high")], latency)
    patches, grid = patches_of(asked.crops_by_tier["high"][0])
    ids = torch.tensor([[*asked.prefix_ids, *[39] * (len(patches) // MERGE**2), *asked.question_ids, word]])
    with torch.no_grad():
        states = MODEL.model(
            input_ids=ids,
            mm_token_type_ids=(ids == 39).int(),
            pixel_values=patches,
            image_grid_thw=grid,
            output_hidden_states=True,
        ).hidden_states
    tokens = prefix.latency_tokens["sample 2", "high"]
    assert list(tokens) == list(OPTIONS.insertion_positions)
    for position, token in tokens.items():
        assert_close(token, states[position][0, -1], rtol=0, atol=1e-4)


def test_a_prefix_of_another_tier_is_refused():
    prefix = EXECUTOR.run_prefix([PrefixItem([sample(0)], "low")], torch.zeros(32))
    with pytest.raises(UserError, match=r"does not contain \[\('sample 0', 'high'\)\]"):
        EXECUTOR.answer([AnswerRequest(sample(0), OPTIONS.full)], prefix=prefix)


@settings(max_examples=30)
@given(st.sampled_from(KNOBS), st.integers(0, 9))
def test_every_knob_acts_and_the_counted_work_is_the_formula(knobs, number):
    asked = sample(number)
    height, width = asked.crops_by_tier[knobs.tier].shape[2:]
    image_tokens = (height // SIDE) * (width // SIDE)
    tokens = image_tokens + len(asked.question_ids) + len(asked.prefix_ids)
    _, work = EXECUTOR.answer([AnswerRequest(asked, knobs)])
    assert work == work_of_answer(OPTIONS, knobs, tokens, patches=MERGE**2 * image_tokens)


def test_shared_work_by_hand():
    # One sample, tier high (2 x 4 tokens), position 1, top-4 and top-2, 6 blocks of which number 3 is dense. Block 0 is
    # shared; blocks 1, 2, 4, 5 have experts.
    asked = sample(0)
    pair = [AnswerRequest(asked, Knobs("high", 1, top_k, 6)) for top_k in (4, 2)]
    tokens = 8 + len(asked.question_ids) + len(asked.prefix_ids)
    _, work = EXECUTOR.answer(pair)
    assert work == WorkCounts(
        1, 1 + 5 + 5, tokens * (4 + 3 * 4 + 3 * 2) + (4 + 2), patches=32
    )  # block 5: last token alone


@torch.no_grad()
def test_deepstack_features_are_added_also_where_their_block_is_dropped():
    request = AnswerRequest(sample(0), Knobs("high", 1, 4, 5))
    assert OPTIONS.block_path(request.knobs)[1] == 0
    without = qwen()
    for weight in without.model.visual.deepstack_merger_list[1].linear_fc2.parameters():
        weight.zero_()
    (answer,), _ = EXECUTOR.answer([request])
    (other,), _ = Executor(QwenAdapter(without), OPTIONS).answer([request])
    assert (answer.first_logits - other.first_logits).abs().max() > 0.01


def test_experts_and_dense_blocks_are_found():
    assert isinstance(adapter_for(MODEL), QwenAdapter)
    assert full_top_k(ADAPTER) == 4
    assert dense_blocks(ADAPTER) == (3,)
    assert ADAPTER.blocks[0].mlp.experts.groupwise_rule == RouterRule(sorts=False, renormalizes=True)


def test_the_dense_variant_has_no_top_k_and_answers_as_transformers_does():
    model = qwen(Qwen3VLConfig, Qwen3VLForConditionalGeneration)
    options = replace(OPTIONS, full_top_k=full_top_k(adapter_for(model)), dense_blocks=())
    assert list(options.unavailable) == ["top_k"]
    batch = [AnswerRequest(sample(number), knobs) for number, knobs in enumerate(list(options.configurations())[::4])]
    answers, work = Executor(adapter_for(model), options).answer(batch, max_new_tokens=3)
    assert work.expert_pairs == 0
    for request, answer in zip(batch, answers, strict=True):
        tokens, logits = stock_answer(model, options, request, 3)
        assert answer.tokens == tokens
        assert_close(answer.first_logits, logits, rtol=0, atol=1e-4)
