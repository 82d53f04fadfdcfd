"""The cache of encoded conditions: batches of what is missing, the least recently used is dropped."""

import torch

from groupwise.workloads.flow.sampling.encodings import ConditioningCache
from groupwise.workloads.flow.task import Condition

CPU = torch.device("cpu")


class CountingEncoder:
    """Encodes a prompt as its length, and records the batches."""

    def __init__(self):
        self.batches = []

    def encode(self, conditions):
        self.batches.append([len(condition.prompt) for condition in conditions])
        return [{"length": torch.tensor([float(len(condition.prompt))])} for condition in conditions]


def cache_of(encoder, **limits):
    return ConditioningCache(encoder, [Condition("x" * length) for length in range(9)], **limits)


def lengths(cache, *indices):
    return cache.of(torch.tensor(indices), CPU)["length"].flatten().tolist()


def test_missing_conditions_are_encoded_in_batches_and_rows_keep_their_order():
    encoder = CountingEncoder()
    cache = cache_of(encoder, max_cached=8, encode_rows=2)
    assert lengths(cache, 5, 3, 5, 1) == [5, 3, 5, 1]
    assert encoder.batches == [[5, 3], [1]]
    assert lengths(cache, 1, 2, 3) == [1, 2, 3]
    assert encoder.batches[2:] == [[2]]
    assert cache.num_encoded == 4


def test_the_least_recently_used_is_dropped():
    encoder = CountingEncoder()
    cache = cache_of(encoder, max_cached=2, encode_rows=4)
    lengths(cache, 1, 2)
    lengths(cache, 1)
    lengths(cache, 3)  # drops 2, not 1
    encoder.batches.clear()
    assert lengths(cache, 1, 3) == [1, 3]
    assert encoder.batches == []
    assert lengths(cache, 2) == [2]
    assert encoder.batches == [[2]]


def test_a_step_with_more_conditions_than_the_cache_holds_still_gets_all_of_them():
    cache = cache_of(CountingEncoder(), max_cached=2, encode_rows=3)
    assert lengths(cache, 1, 2, 3, 4) == [1, 2, 3, 4]
