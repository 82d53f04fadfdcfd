"""Features are the counted work; a profile covers configurations and samples of a model, and can be fitted to."""

import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny.llava import OPTIONS, llava_olmoe, sample

from groupwise.core.errors import UserError
from groupwise.latency.estimator import LatencyEstimator
from groupwise.latency.machine import Machine
from groupwise.latency.records import DECODE, PREFILL, VISION, MeasuredLatency
from groupwise.workloads.controller.latency.estimates import (
    KnobFeatures,
    KnobLatencyEstimator,
    architecture_fingerprint,
)
from groupwise.workloads.controller.latency.profile import profile
from groupwise.workloads.controller.model.adapters import LlavaAdapter
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor
from groupwise.workloads.controller.model.inputs import prompt_length
from groupwise.workloads.controller.model.knobs import Knobs, work_of_answer

MODEL = llava_olmoe()
EXECUTOR = Executor(LlavaAdapter(MODEL), OPTIONS)
SAMPLES = [sample(number) for number in range(8)]
KNOBS, WORK = list(OPTIONS.configurations()), KnobFeatures(OPTIONS)
LENGTHS = {"low": 12, "medium": 16, "high": 24}


def counted_ms(executor, request, new_tokens):
    """A machine that takes 1 ms a crop, 0.5 ms a block and 0.01 ms an expert pair, as the executor counts them."""
    _, prompt = executor.answer([request])
    _, whole = executor.answer([request], max_new_tokens=new_tokens)
    blocks, pairs = whole.block_rows - prompt.block_rows, whole.expert_pairs - prompt.expert_pairs
    stages = {
        VISION: 1.0 * whole.crops,
        PREFILL: 0.5 * prompt.block_rows + 0.01 * prompt.expert_pairs,
        DECODE: 0.5 * blocks + 0.01 * pairs,
    }
    return MeasuredLatency(stages, sum(stages.values()))


@pytest.fixture(scope="module")
def estimator():
    seen = profile(EXECUTOR, SAMPLES, measurements=80, new_tokens=4, timer=counted_ms)
    return LatencyEstimator.fit(seen, model=architecture_fingerprint(MODEL))


def test_features_by_hand():
    # Position 2, top-2, 6 of 8 blocks on 12 tokens: blocks 6 and 4 go, 2 run with top-4 and 4 with top-2.
    part = WORK.features(Knobs("low", 2, 2, 6), prompt_tokens=12, new_tokens=3)
    assert part[VISION] == {"crops": 2, "tokens": 12}
    # The last token meets the experts of all of them, the 11 before it not those of the last block.
    pairs = 2 * 4 + 4 * 2
    assert part[PREFILL] == {
        "tokens": 12,
        "blocks": 6,
        "block_tokens": 72,
        "attended": 6 * 144,
        "expert_pairs": pairs + 11 * (pairs - 2),
    }
    # Two steps, which attend to 13 and 14 tokens.
    assert part[DECODE] == {"steps": 2, "blocks": 12, "attended": 6 * 27, "expert_pairs": pairs * 2}


@given(st.sampled_from(KNOBS), st.integers(1, 99))
def test_features_count_the_work_that_the_executor_counts(knobs, tokens):
    part, work = WORK.features(knobs, prompt_tokens=tokens), work_of_answer(OPTIONS, knobs, tokens)
    assert part[VISION]["crops"] == work.crops
    assert (part[PREFILL]["blocks"], part[PREFILL]["expert_pairs"]) == (work.block_rows, work.expert_pairs)
    assert not any(part[DECODE].values())


def test_an_estimator_fitted_to_a_profile_knows_the_cost_of_every_knob(estimator):
    # The machine's times are exactly its counted work, so the estimates of all settings are exact.
    asked = sample(99)
    prompt_tokens = {tier: prompt_length(EXECUTOR.adapter, asked, tier) for tier in OPTIONS.crops_by_tier}
    assert prompt_tokens == {
        tier: 4 * (1 + crops) + len(asked.question_ids) for tier, crops in OPTIONS.crops_by_tier.items()
    }
    chosen = KNOBS[::17]
    for new_tokens in (1, 3):
        found = KnobLatencyEstimator(estimator, OPTIONS, new_tokens=new_tokens).estimate(prompt_tokens, chosen)
        for knobs, expected in zip(chosen, found, strict=True):
            measured = counted_ms(EXECUTOR, AnswerRequest(asked, knobs), new_tokens)
            assert expected.total_ms == pytest.approx(measured.total_ms, rel=0.01)
            assert expected.stages_ms[DECODE] == pytest.approx(measured.stages_ms[DECODE], rel=0.02, abs=0.01)


@given(st.data())
def test_more_of_any_knob_is_never_estimated_to_take_less(estimator, data):
    asked, knobs = KnobLatencyEstimator(estimator, OPTIONS), data.draw(st.sampled_from(KNOBS))
    for name, options in {
        "tier": list(OPTIONS.crops_by_tier),
        "insertion_position": OPTIONS.insertion_positions,
        "top_k": OPTIONS.top_ks,
        "blocks": OPTIONS.block_totals,
    }.items():
        rows = asked.rows(LENGTHS, [Knobs(**vars(knobs) | {name: option}) for option in options])
        for times in (rows.total_ms, rows.upper_ms):
            assert all(less <= more for less, more in itertools.pairwise(times))


def test_a_profile_by_the_clock():
    seen = profile(EXECUTOR, SAMPLES, measurements=60, configurations=30, new_tokens=3)
    assert {one.sample for one in seen} == {one.name for one in SAMPLES}
    for one in seen:
        assert set(one.measured.stages_ms) == {VISION, PREFILL, DECODE}
        assert sum(one.measured.stages_ms.values()) == pytest.approx(one.measured.total_ms, rel=0.05)
        assert (one.measured.stages_ms[DECODE] > 0) == (one.features[DECODE]["steps"] > 0)
    # The first pass sees each pair once, the second one sees the same in another order.
    first, second = seen[:30], seen[30:60]
    pairs = [[(one.configuration, one.sample, one.features) for one in part] for part in (first, second)]
    assert len({one.configuration for one in first}) == 30
    assert sorted(pairs[0], key=str) == sorted(pairs[1], key=str)
    assert pairs[0] != pairs[1]
    expected = KnobLatencyEstimator(LatencyEstimator.fit(seen, model="tiny"), OPTIONS, new_tokens=3).rows(LENGTHS)
    assert len(expected) == len(KNOBS)
    assert (expected.upper_ms > expected.total_ms).all()
    assert (expected.total_ms > 0).all()


def test_a_profile_ends_when_its_time_is_over():
    begun = time.perf_counter()
    seen = profile(EXECUTOR, SAMPLES, seconds=0.5, timer=lambda *_: MeasuredLatency({}, 1.0))
    assert seen
    assert time.perf_counter() - begun >= 0.5


def test_configurations_that_compute_the_same_have_one_name():
    # Top-4 is full, so with all blocks the insertion position changes nothing.
    seen = profile(EXECUTOR, SAMPLES, configurations=999, measurements=999, timer=lambda *_: MeasuredLatency({}, 1.0))
    paths = {(knobs.tier, OPTIONS.block_path(knobs)) for knobs in KNOBS}
    assert len({one.configuration for one in seen}) == len(paths) < len(KNOBS)


def test_the_architecture_fingerprint_ignores_weights(tmp_path):
    before = architecture_fingerprint(MODEL)
    EXECUTOR.answer([AnswerRequest(sample(0), OPTIONS.full)])
    MODEL.save_pretrained(tmp_path)
    assert architecture_fingerprint(type(MODEL).from_pretrained(tmp_path)) == architecture_fingerprint(MODEL) == before
    assert architecture_fingerprint(llava_olmoe(kv_heads=2)) != before
    assert architecture_fingerprint(llava_olmoe().to(torch.bfloat16)) != before


def test_bad_input_is_refused(estimator, tmp_path):
    estimator.save(tmp_path / "estimator.json")
    with pytest.raises(UserError, match=r"model Llava.*, not Llava"):
        LatencyEstimator.load(tmp_path / "estimator.json", model=architecture_fingerprint(llava_olmoe(kv_heads=2)))
    here = Machine(**vars(estimator.machine) | {"threads": 64})
    with pytest.raises(UserError, match=r"threads 1, not 64"):
        LatencyEstimator.load(tmp_path / "estimator.json", model=estimator.model, machine=here)
    with pytest.raises(UserError, match="The number of samples is 1: it must be 2 or more"):
        profile(EXECUTOR, SAMPLES[:1])
    with pytest.raises(UserError, match="seconds is 0"):
        profile(EXECUTOR, SAMPLES, seconds=0)
    with pytest.raises(UserError, match="top_k is 9: this model offers 1, 2, 3, 4"):
        KnobLatencyEstimator(estimator, OPTIONS).rows(LENGTHS, [Knobs("low", 1, 9, 8)])
    assert np.isfinite(KnobLatencyEstimator(estimator, OPTIONS).rows(LENGTHS).upper_ms).all()
