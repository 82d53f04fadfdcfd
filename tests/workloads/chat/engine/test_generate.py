"""A member's completion depends only on (weights, prompt, seed, step, group, member)."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny.llama import FAMILIES, llama, ragged_prompts, rows_for
from torch.testing import assert_close

from groupwise.core.errors import UserError
from groupwise.core.placement import RolloutRows
from groupwise.workloads.chat.config import PolicyConfig, SamplingParams
from groupwise.workloads.chat.engine.generate import GenerationLoop, generate
from groupwise.workloads.chat.engine.policy import make_policy
from groupwise.workloads.chat.engine.sampler import pad_rows
from groupwise.workloads.chat.engine.scheduler import Scheduler
from groupwise.workloads.chat.engine.score import score

STOPS = tuple(range(5, 13))
SAMPLING = SamplingParams(max_new_tokens=40, stop_token_ids=STOPS)
PROMPTS = ragged_prompts(4)
ROWS = rows_for(4, 3)
POLICY = make_policy(llama().double(), PolicyConfig(dtype="float64", forward="shared_prefix"))
ALL = generate(POLICY, PROMPTS, ROWS.condition.tolist(), ROWS, SAMPLING)


def only(rows: RolloutRows, some: list[int]) -> RolloutRows:
    return replace(rows, group=rows.group[some], member=rows.member[some], condition=rows.condition[some])


@given(
    decode_rows=st.integers(1, 13),
    some=st.lists(st.integers(0, 11), min_size=1, max_size=12, unique=True),
)
@settings(max_examples=12)
def test_other_rows_order_and_decode_rows_do_not_change_a_completion(decode_rows, some):
    rows = only(ROWS, some)
    completions = generate(POLICY, PROMPTS, rows.condition.tolist(), rows, SAMPLING, decode_rows=decode_rows)
    for completion, row in zip(completions, some, strict=True):
        assert completion.ids == ALL[row].ids
        assert completion.stopped == ALL[row].stopped
        assert_close(completion.logps, ALL[row].logps, atol=1e-9, rtol=0)
        assert_close(completion.entropies, ALL[row].entropies, atol=1e-9, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_generates_with_shared_prompts_what_it_generates_without(family):
    model = FAMILIES[family]().double()
    policies = [
        make_policy(copy.deepcopy(model), PolicyConfig(dtype="float64", forward=forward))
        for forward in ("plain", "shared_prefix")
    ]
    sampling = SamplingParams(0.9, 30, 0.95, 12, STOPS)
    of = ROWS.condition.tolist()
    plain = generate(policies[0], PROMPTS, of, ROWS, sampling)
    shared = generate(policies[1], PROMPTS, of, ROWS, sampling, decode_rows=5)
    for completion, expected in zip(shared, plain, strict=True):
        assert completion.ids == expected.ids
        assert_close(completion.logps, expected.logps, atol=1e-6, rtol=0)
        assert torch.equal(completion.num_candidates, expected.num_candidates)


def test_seed_step_group_and_member_matter():
    of = ROWS.condition.tolist()
    for changed in (replace(ROWS, seed=4), replace(ROWS, step=3), replace(ROWS, group=ROWS.group + 4)):
        other = generate(POLICY, PROMPTS, of, changed, SAMPLING)
        assert sum(a.ids != b.ids for a, b in zip(other, ALL, strict=True)) > 8
    assert len({completion.ids for completion in ALL}) == len(ALL)


def test_stop_tokens_end_a_completion_and_belong_to_it():
    for completion in ALL:
        assert len(completion) == len(completion.logps) == len(completion.entropies) <= 40
        assert completion.stopped == (completion.ids[-1] in STOPS)
        assert not set(completion.ids[:-1]) & set(STOPS)
        assert completion.stopped or len(completion) == 40
    assert {completion.stopped for completion in ALL} == {True, False} or len({len(each) for each in ALL}) > 4


@pytest.mark.parametrize("sampling", [SAMPLING, SamplingParams(0.7, 10, 0.8, 20, STOPS)], ids=["free", "narrow"])
def test_the_ratio_is_1_before_the_first_update(sampling):
    of = ROWS.condition.tolist()
    completions = generate(POLICY, PROMPTS, of, ROWS, sampling, decode_rows=5)
    scored = score(POLICY, PROMPTS, of, completions, sampling, width=50)
    assert scored.logp.shape == (12, 50)
    assert_close(scored.logp, pad_rows([completion.logps for completion in completions], 50), atol=1e-9, rtol=0)
    assert_close(scored.entropy, pad_rows([completion.entropies for completion in completions], 50), atol=1e-9, rtol=0)


def test_decode_rows_limits_the_cache():
    uniforms = torch.rand(12, 40, dtype=torch.float64)
    loop = GenerationLoop(POLICY, PROMPTS, Scheduler(ROWS.condition.tolist(), 2), uniforms, SAMPLING)
    loop.run()
    keys, _ = loop.row_cache.layers[0]
    assert keys.shape[0] == 2
    assert not loop.prompt_cache.prompts, "a prompt is dropped with its last row"
    assert not loop.prompt_states


def test_greedy_takes_the_likeliest():
    of = ROWS.condition.tolist()
    greedy = generate(POLICY, PROMPTS, of, ROWS, SamplingParams(temperature=0, max_new_tokens=6))
    assert all(greedy[row].ids == greedy[row // 3 * 3].ids for row in range(12))
    with torch.no_grad():
        plain = make_policy(llama().double(), PolicyConfig(dtype="float64", forward="plain"))
        first = plain(torch.tensor([PROMPTS[0]])).logits[0, -1].argmax()
    assert greedy[0].ids[0] == int(first)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], "Prompt 0 has no tokens"),
        ([[3], [4] * 100], "Prompt 1 has 100 tokens, and with sampling.max_new_tokens 40 it is longer than the 128"),
        ([[96]], "holds token 96 and the model has a vocabulary of 96"),
    ],
)
def test_prompts_that_cannot_be_completed_are_refused(prompts, message):
    with pytest.raises(UserError, match=message):
        generate(POLICY, prompts, [0], only(ROWS, [0]), SAMPLING)
