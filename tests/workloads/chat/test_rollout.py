"""A member's completion depends only on (weights, prompt, seed, step, group, member)."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from groupwise.core.errors import UserError
from groupwise.core.placement import RolloutRows
from groupwise.workloads.chat.config import PolicyConfig, SamplingParams
from groupwise.workloads.chat.engine.generate import generate
from groupwise.workloads.chat.engine.policy import make_policy
from groupwise.workloads.chat.engine.sampler import pad_rows
from groupwise.workloads.chat.engine.score import score
from workloads.chat.models import FAMILIES, llama, ragged_prompts, rows_for

STOPS = tuple(range(5, 13))
SAMPLING = SamplingParams(max_new_tokens=40, stop_ids=STOPS)
PROMPTS = ragged_prompts(4)
ROWS = rows_for(4, 3)
POLICY = make_policy(llama().double(), PolicyConfig(dtype="float64", path="shared"))
ALL = generate(POLICY, PROMPTS, ROWS.condition.tolist(), ROWS, SAMPLING)


def only(rows: RolloutRows, some: list[int]) -> RolloutRows:
    return replace(rows, group=rows.group[some], member=rows.member[some], condition=rows.condition[some])


@given(
    decode_rows=st.integers(1, 13),
    some=st.lists(st.integers(0, 11), min_size=1, max_size=12, unique=True),
)
@settings(max_examples=12)
def test_company_order_and_decode_rows_change_nothing(decode_rows, some):
    rows = only(ROWS, some)
    found = generate(POLICY, PROMPTS, rows.condition.tolist(), rows, SAMPLING, decode_rows=decode_rows)
    for nth, row in enumerate(some):
        assert found[nth].ids == ALL[row].ids
        assert found[nth].stopped == ALL[row].stopped
        assert_close(found[nth].logps, ALL[row].logps, atol=1e-9, rtol=0)
        assert_close(found[nth].entropies, ALL[row].entropies, atol=1e-9, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_what_it_says_alone(family):
    model = FAMILIES[family]().double()
    policies = [
        make_policy(copy.deepcopy(model), PolicyConfig(dtype="float64", path=path)) for path in ("plain", "shared")
    ]
    sampling = SamplingParams(0.9, 30, 0.95, 12, STOPS)
    of = ROWS.condition.tolist()
    plain = generate(policies[0], PROMPTS, of, ROWS, sampling)
    shared = generate(policies[1], PROMPTS, of, ROWS, sampling, decode_rows=5)
    assert [each.ids for each in plain] == [each.ids for each in shared]
    for ours, theirs in zip(shared, plain, strict=True):
        assert_close(ours.logps, theirs.logps, atol=1e-6, rtol=0)
        assert torch.equal(ours.kept, theirs.kept)


def test_seed_step_group_and_member_matter():
    of = ROWS.condition.tolist()
    for changed in (replace(ROWS, seed=4), replace(ROWS, step=3), replace(ROWS, group=ROWS.group + 4)):
        other = generate(POLICY, PROMPTS, of, changed, SAMPLING)
        assert sum(a.ids != b.ids for a, b in zip(other, ALL, strict=True)) > 8
    assert len({each.ids for each in ALL}) == len(ALL)


def test_stop_tokens_end_a_completion_and_belong_to_it():
    for each in ALL:
        assert len(each) == len(each.logps) == len(each.entropies) <= 40
        assert each.stopped == (each.ids[-1] in STOPS)
        assert not set(each.ids[:-1]) & set(STOPS)
        assert each.stopped or len(each) == 40
    assert {each.stopped for each in ALL} == {True, False} or len({len(each) for each in ALL}) > 4


@pytest.mark.parametrize("sampling", [SAMPLING, SamplingParams(0.7, 10, 0.8, 20, STOPS)], ids=["free", "narrow"])
def test_the_ratio_is_1_before_the_first_update(sampling):
    of = ROWS.condition.tolist()
    completions = generate(POLICY, PROMPTS, of, ROWS, sampling, decode_rows=5)
    scored = score(POLICY, PROMPTS, of, completions, sampling, width=50)
    assert scored.logp.shape == (12, 50)
    assert_close(scored.logp, pad_rows([each.logps for each in completions], 50), atol=1e-9, rtol=0)
    assert_close(scored.entropy, pad_rows([each.entropies for each in completions], 50), atol=1e-9, rtol=0)


def test_a_cap_on_rows_caps_the_cache():
    from groupwise.workloads.chat.engine.scheduler import Flight

    chances = torch.rand(12, 40, dtype=torch.float64)
    flight = Flight(POLICY, PROMPTS, ROWS.condition.tolist(), chances, SAMPLING, 2)
    with POLICY.sampling():
        flight.run()
    keys, _ = flight.own.layers[0]
    assert keys.shape[0] == 2
    assert not flight.cached.numbers, "prompts leave with their last row"


def test_greedy_takes_the_likeliest():
    of = ROWS.condition.tolist()
    found = generate(POLICY, PROMPTS, of, ROWS, SamplingParams(temperature=0, max_new_tokens=6))
    assert all(found[row].ids == found[row // 3 * 3].ids for row in range(12))
    with torch.no_grad():
        plain = make_policy(llama().double(), PolicyConfig(dtype="float64", path="plain"))
        first = plain(torch.tensor([PROMPTS[0]])).logits[0, -1].argmax()
    assert found[0].ids[0] == int(first)


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
