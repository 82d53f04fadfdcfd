import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from groupwise.core.epochs import keyed_permutation
from groupwise.core.placement import place
from groupwise.core.randomness import normal, random_bits, to_normal, uniform
from groupwise.core.shape import StepShape

KEYS = ("seed", "step", "group", "member", "decision", "element")


def test_splitmix_by_hand():
    # SplitMix64 seeded with 0 gives 0xE220A8397B1DCDAF first: the finaliser of the golden constant. One key 0 is mixed
    # with it once, then the state (0 + that) is mixed again.
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    assert int(random_bits(0)) & mask == mix(0xE220A8397B1DCDAF)


@given(st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=6), st.integers(0, 5))
def test_a_number_does_not_depend_on_its_neighbours(keys, position):
    position %= len(keys)
    wrapped = (keys[position] + 2**63) % 2**64 - 2**63
    batch = torch.tensor([1, wrapped, -7])
    together = random_bits(*keys[:position], batch, *keys[position + 1 :])
    assert together[1] == random_bits(*keys)


@pytest.mark.parametrize("varying", KEYS)
def test_uniform_along_every_key(varying):
    keys = dict.fromkeys(KEYS, 3) | {varying: torch.arange(100_000)}
    sample = uniform(**keys)
    assert sample.min() >= 0
    assert sample.max() < 1
    assert stats.kstest(sample.numpy(), "uniform").pvalue > 0.001


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(KEYS, 2)))
def test_neighbouring_keys_are_independent(one, other):
    keys = dict.fromkeys(KEYS, 0) | {one: torch.arange(300)[:, None], other: torch.arange(300)}
    table = uniform(**keys)
    pairs = [(table[:-1], table[1:]), (table[:, :-1], table[:, 1:]), (table, table.T.contiguous())]
    for left, right in pairs:
        off_diagonal = ~torch.eye(*left.shape, dtype=torch.bool)
        cells = (left[off_diagonal] * 8).long() * 8 + (right[off_diagonal] * 8).long()
        # each cell counted on its own: the transposed pair counts every couple twice, hence the mild level
        assert stats.chisquare(torch.bincount(cells, minlength=64).numpy()).pvalue > 1e-4


def test_every_bit_is_fair():
    bits = random_bits(7, torch.arange(200_000))
    ones = torch.stack([(bits >> place & 1).double().mean() for place in range(64)])
    assert (ones - 0.5).abs().max() < 5 * 0.5 / math.sqrt(200_000)


def test_normal_numbers_are_normal_and_finite():
    sample = normal(1, 2, torch.arange(1000)[:, None], 4, 5, torch.arange(100))
    assert stats.kstest(sample.flatten().numpy(), "norm").pvalue > 0.001
    neighbours = torch.corrcoef(torch.stack([sample[:-1].flatten(), sample[1:].flatten()]))[0, 1]
    assert neighbours.abs() < 0.015
    extremes = to_normal(torch.tensor([0, -1, 2**63 - 1, -(2**63)]))
    assert extremes.isfinite().all()
    assert extremes[0] == -extremes[1]


def test_a_rollouts_numbers_do_not_depend_on_where_it_runs():
    shape = {"conditions": 20, "conditions_per_step": 4, "group_size": 4}
    drawn = {}
    for ranks, rows, kind in [(1, 1, "whole"), (4, 2, "shuffled"), (8, 2, "spread")]:
        placed = place(StepShape(**shape, ranks=ranks, rows_per_pass=rows, placement=kind), seed=1, step=9)
        for rank in range(ranks):
            for part in placed.rows_of(rank).passes():
                for group, member, number in zip(part.group, part.member, part.normal(2, elements=3), strict=True):
                    drawn.setdefault((int(group), int(member)), []).append(tuple(number.tolist()))
    assert len(drawn) == 16
    assert all(len(numbers) == 3 and len(set(numbers)) == 1 for numbers in drawn.values())


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_permutations_are_equally_likely(size):
    seen = Counter(tuple(keyed_permutation(torch.arange(size), size, 0, epoch).tolist()) for epoch in range(1200))
    counts = [seen[order] for order in itertools.permutations(range(size))]
    assert stats.chisquare(counts).pvalue > 0.001


@given(st.integers(1, 5000), st.integers(0, 2**32))
def test_a_keyed_permutation_is_one(size, key):
    assert keyed_permutation(torch.arange(size), size, key).sort().values.tolist() == list(range(size))
