"""The scheduler alone: integers, no model."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from groupwise.workloads.chat.engine.scheduler import Scheduler


def rows(sequences):
    return [sequence.row for sequence in sequences]


def test_rows_of_a_prompt_start_together_and_free_slots_are_filled():
    scheduler = Scheduler([1, 0, 1, 0], max_slots=3)
    assert rows(scheduler.admit()) == rows(scheduler.running) == [1, 3, 0]
    assert not scheduler.can_admit
    scheduler.finish([1])
    assert scheduler.can_admit
    assert rows(scheduler.admit()) == [2]
    assert rows(scheduler.running) == [1, 0, 2]


def test_the_last_running_sequences_move_into_freed_slots():
    scheduler = Scheduler([0] * 5, max_slots=5)
    scheduler.admit()
    # slots 0 to 4 hold rows 0 to 4; without 1 and 3, row 4 fills slot 1, and slot 2 stays
    assert scheduler.finish([1, 3]).moves == [(4, 1)]
    assert rows(scheduler.running) == [0, 4, 2]
    assert scheduler.finish([2]).moves == [], "the last slot leaves no gap"


def test_a_prompt_is_freed_with_its_last_sequence_running_or_waiting():
    scheduler = Scheduler([7, 7, 7, 9], max_slots=2)
    scheduler.admit()
    assert scheduler.finish([0, 1]).freed_prompts == set(), "a row of prompt 7 still waits"
    scheduler.admit()
    assert scheduler.finish([0]).freed_prompts == {7}
    assert scheduler.finish([0]).freed_prompts == {9}
    assert scheduler.is_done


def test_there_are_no_more_slots_than_rows():
    assert Scheduler([0, 0], max_slots=100).max_slots == 2


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=20), st.integers(1, 8))
def test_every_row_runs_once_and_moves_say_in_which_slot(prompts_and_lengths, max_slots):
    prompt_of_row, lengths = zip(*prompts_and_lengths, strict=True)
    scheduler = Scheduler(prompt_of_row, max_slots)
    slots: list[int] = []  # the row in each slot, by what `admit` and `finish` return alone
    started, freed = [], []
    while not scheduler.is_done:
        admitted = rows(scheduler.admit())
        slots, started = slots + admitted, started + admitted
        assert len(slots) == len(scheduler.running) <= max_slots
        assert not scheduler.can_admit
        for sequence in scheduler.running:
            sequence.num_generated += 1
        done = [slot for slot, each in enumerate(scheduler.running) if each.num_generated == lengths[each.row]]
        eviction = scheduler.finish(done)
        for source, target in eviction.moves:
            assert target in done
            slots[target] = slots[source]
        del slots[len(scheduler.running) :]
        assert slots == rows(scheduler.running)
        freed += eviction.freed_prompts
        needed = {sequence.prompt for sequence in (*scheduler.running, *scheduler.waiting)}
        assert sorted(freed) == sorted({*prompt_of_row} - needed), "each prompt is freed once, when no row needs it"
    assert sorted(started) == list(range(len(lengths)))


def test_it_imports_no_torch():
    program = "import sys, groupwise.workloads.chat.engine.scheduler; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
