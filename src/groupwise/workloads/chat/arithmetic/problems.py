"""Chains of sums in words: made from a random generator, each belonging to one split for good."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

FEWEST_TERMS, MOST_TERMS = 3, 5
LARGEST_TOTAL = 40
_HELD_OUT_OF_16 = 3


class Split(StrEnum):
    TRAIN = "train"
    HELD_OUT = "held_out"
    TEST = "test"


@dataclass(frozen=True)
class Problem:
    """A first number and signed terms; no running total leaves 0..40."""

    terms: tuple[int, ...]

    @property
    def totals(self) -> list[int]:
        return np.cumsum(self.terms).tolist()

    @property
    def answer(self) -> int:
        return sum(self.terms)

    @property
    def text(self) -> str:
        first, *others = self.terms
        return str(first) + signed(others)

    @property
    def split(self) -> Split:
        """By a hash of the text, so that no chain is in two splits, whoever draws it."""
        place = hashlib.blake2b(self.text.encode(), digest_size=1).digest()[0] % 16
        if place == 0:
            return Split.TEST
        return Split.HELD_OUT if place <= _HELD_OUT_OF_16 else Split.TRAIN


def signed(terms: list[int] | tuple[int, ...]) -> str:
    return "".join(f" {'+' if term > 0 else '-'} {abs(term)}" for term in terms)


def draw_problem(random: np.random.Generator, split: Split) -> Problem:
    """A problem of the split, by drawing until one is of it."""
    while True:
        terms = [int(random.integers(2, LARGEST_TOTAL))]
        for _ in range(int(random.integers(FEWEST_TERMS, MOST_TERMS + 1)) - 1):
            terms.append(_draw_term(random, sum(terms)))
        problem = Problem(tuple(terms))
        if problem.split is split:
            return problem


def _draw_term(random: np.random.Generator, total: int) -> int:
    size = int(random.integers(1, 10))
    is_minus = random.random() < 0.5
    if is_minus and total - size < 0:
        is_minus = False
    elif not is_minus and total + size > LARGEST_TOTAL:
        is_minus = True
    return -size if is_minus else size
