"""Configurations are interleaved, round after round, timed by a fake clock."""

import pytest
from tiny.llava import OPTIONS, llava_olmoe, sample

from groupwise.core.errors import UserError
from groupwise.workloads.controller.latency.measure import MeasuredModel, measure, with_executor
from groupwise.workloads.controller.model.knobs import Knobs

CHEAP, DEAR = Knobs("low", 1, 1, 5), Knobs("high", 1, 4, 8)


def test_configurations_are_interleaved_and_warm_up_is_not_counted():
    seen, now_ms, progress = [], [0.0], []
    takes_ms = {(CHEAP, 0): 900, (DEAR, 0): 800, (CHEAP, 1): 10, (DEAR, 1): 100, (CHEAP, 2): 20, (DEAR, 2): 300}

    def answer(knobs, run, tokens):
        seen.append((knobs, run))
        assert tokens == 4
        now_ms[0] += takes_ms[knobs, run]

    found = measure(
        MeasuredModel("fake", llava_olmoe(), (CHEAP, DEAR), answer),
        warm_up=1,
        runs=2,
        new_tokens=4,
        clock=lambda: now_ms[0] / 1000,
        after_answer=lambda: progress.append(len(seen)),
    )
    assert seen == list(takes_ms)
    assert progress == [1, 2, 3, 4, 5, 6]
    assert {knobs: summary.total.p50_ms for knobs, summary in found.items()} == pytest.approx({CHEAP: 15, DEAR: 200})
    assert {summary.runs for summary in found.values()} == {2}


def test_each_configuration_is_measured_once_and_gives_real_answers():
    subject = with_executor("tiny", llava_olmoe(), OPTIONS, [sample(0), sample(1)])
    by_depth = {(tier, 4, blocks) for tier in ("low", "medium", "high") for blocks in (5, 6, 7, 8)}
    by_top_k = {(tier, top_k, 8) for tier in ("low", "medium", "high") for top_k in (1, 2, 3, 4)}
    assert {(knobs.tier, knobs.top_k, knobs.blocks) for knobs in subject.settings} == by_depth | by_top_k
    assert len(subject.settings) == len(by_depth | by_top_k)
    assert subject.full == OPTIONS.full
    (given,), work = subject.answer(CHEAP, 1, 3)
    assert len(given.tokens) == 3
    assert work.crops == 1 + OPTIONS.crops_by_tier["low"]
    assert work.block_rows == 3 * 5


@pytest.mark.parametrize("wrong", [{"runs": 0}, {"warm_up": -1}, {"new_tokens": 0}])
def test_counts_below_the_minimum_are_refused(wrong):
    subject = MeasuredModel("fake", llava_olmoe(), (CHEAP,), lambda *_: None)
    with pytest.raises(UserError, match=f"{next(iter(wrong))} is"):
        measure(subject, **({"runs": 1, "warm_up": 0, "new_tokens": 1} | wrong))
