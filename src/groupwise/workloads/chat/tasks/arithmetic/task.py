"""The embedded example: chains of sums, asked in a dialogue. Every chain belongs to one split."""

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


Message = dict[str, str]
QUESTIONS = (
    "What is {}?",
    "Work out {}.",
    "How much is {}?",
    "Hello! Can you tell me what {} is?",
    "I have {}. What does that make?",
    "Please add up {}.",
)
FOLLOW_UPS = ("And then{}?", "Now go on with{}.", "What if I go on with{}?")
_FOLLOW_UP_SHARE = 0.25


def solve_step_by_step(problem: Problem) -> str:
    """Every step written out; then the answer in GSM8K's form."""
    steps = [
        f"{before}{term:+}={after}"
        for before, term, after in zip(problem.totals, problem.terms[1:], problem.totals[1:], strict=False)
    ]
    return "\n".join([*steps, f"#### {problem.answer}"])


def answer_directly(problem: Problem) -> str:
    """The answer alone: all of it has to be worked out before the first digit is written."""
    return f"#### {problem.answer}"


def make_dialogue(problem: Problem, random: np.random.Generator) -> list[Message]:
    """A question; or the first half of it, its answer, and the rest as a follow-up."""
    opening = QUESTIONS[int(random.integers(len(QUESTIONS)))]
    if random.random() >= _FOLLOW_UP_SHARE:
        return [user(opening.format(problem.text))]
    first = Problem(problem.terms[:2])
    going_on = FOLLOW_UPS[int(random.integers(len(FOLLOW_UPS)))].format(signed(problem.terms[2:]))
    return [user(opening.format(first.text)), assistant(answer_directly(first)), user(going_on)]


def remaining_problem(problem: Problem, messages: list[Message]) -> Problem:
    """What is left to do: all of it, or what follows after the total that was already said."""
    return problem if len(messages) == 1 else Problem((sum(problem.terms[:2]), *problem.terms[2:]))


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def train_rows() -> list[dict[str, object]]:
    """Rows as `data.train` takes them: prompt and answer."""
    return _prompt_rows(Split.TRAIN, 2048)


def held_out_rows() -> list[dict[str, object]]:
    return _prompt_rows(Split.HELD_OUT, 512)


def _prompt_rows(split: Split, count: int) -> list[dict[str, object]]:
    return [{"prompt": row["messages"], "answer": row["answer"]} for row in rows(split, count, seed=0)]


def rows(split: Split, count: int, *, seed: int) -> list[dict[str, object]]:
    """Questions of a split, all different, in the form of a dataset: messages and the right answer."""
    random = np.random.default_rng([seed, *map(ord, split)])
    made: dict[str, dict[str, object]] = {}
    while len(made) < count:
        problem = draw_problem(random, split)
        made.setdefault(problem.text, {"messages": make_dialogue(problem, random), "answer": f"#### {problem.answer}"})
    return list(made.values())
