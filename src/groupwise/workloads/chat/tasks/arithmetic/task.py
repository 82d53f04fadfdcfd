"""The embedded chat task: sums such as "14 - 2 + 9", asked in a dialogue, with the model that is shipped for them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

MODEL_FOLDER = Path(__file__).parent / "asset"
"""The pretrained model and its tokenizer, as transformers saves them."""
MIN_TERMS, MAX_TERMS = 3, 5
MAX_TOTAL = 40
TRAIN_ROWS, HELD_OUT_ROWS = 2048, 512
QUESTIONS = (
    "What is {}?",
    "Work out {}.",
    "How much is {}?",
    "Hello! Can you tell me what {} is?",
    "I have {}. What does that make?",
    "Please add up {}.",
)
FOLLOW_UPS = ("And then{}?", "Now go on with{}.", "What if I go on with{}?")
_HELD_OUT_OF_16 = 3
_FOLLOW_UP_FRACTION = 0.25

Message = dict[str, str]


def train_rows() -> list[dict[str, object]]:
    """Rows of a dataset to train on: `prompt`, a list of messages, and `answer`."""
    return make_rows(Split.TRAIN, TRAIN_ROWS, seed=0)


def held_out_rows() -> list[dict[str, object]]:
    """Rows to evaluate on. No problem of theirs is among the training rows."""
    return make_rows(Split.HELD_OUT, HELD_OUT_ROWS, seed=0)


class Split(StrEnum):
    TRAIN = "train"
    HELD_OUT = "held_out"
    TEST = "test"


def make_rows(split: Split, count: int, *, seed: int) -> list[dict[str, object]]:
    """Different problems of a split, as rows of a dataset."""
    random = np.random.default_rng([seed, *map(ord, split)])
    rows: dict[str, dict[str, object]] = {}
    while len(rows) < count:
        problem = draw_problem(random, split)
        rows.setdefault(problem.text, {"prompt": make_dialogue(problem, random), "answer": answer_directly(problem)})
    return list(rows.values())


@dataclass(frozen=True)
class Problem:
    """A first number and signed terms; every running total is between 0 and 40."""

    terms: tuple[int, ...]

    @property
    def totals(self) -> list[int]:
        """The running totals."""
        return np.cumsum(self.terms).tolist()

    @property
    def answer(self) -> int:
        return sum(self.terms)

    @property
    def text(self) -> str:
        first, *others = self.terms
        return str(first) + _format_terms(others)

    @property
    def split(self) -> Split:
        """By a hash of the text, so that no problem is in two splits."""
        bucket = hashlib.blake2b(self.text.encode(), digest_size=1).digest()[0] % 16
        if bucket == 0:
            return Split.TEST
        return Split.HELD_OUT if bucket <= _HELD_OUT_OF_16 else Split.TRAIN


def draw_problem(random: np.random.Generator, split: Split) -> Problem:
    """A random problem of the split, by rejection sampling."""
    while True:
        terms = [int(random.integers(2, MAX_TOTAL))]
        for _ in range(int(random.integers(MIN_TERMS, MAX_TERMS + 1)) - 1):
            terms.append(_draw_term(random, sum(terms)))
        problem = Problem(tuple(terms))
        if problem.split is split:
            return problem


def _draw_term(random: np.random.Generator, total: int) -> int:
    size = int(random.integers(1, 10))
    is_minus = random.random() < 0.5
    if is_minus and total - size < 0:
        is_minus = False
    elif not is_minus and total + size > MAX_TOTAL:
        is_minus = True
    return -size if is_minus else size


def _format_terms(terms: list[int] | tuple[int, ...]) -> str:
    return "".join(f" {'+' if term > 0 else '-'} {abs(term)}" for term in terms)


def make_dialogue(problem: Problem, random: np.random.Generator) -> list[Message]:
    """One question; or a question about the first two terms, its answer, and the remaining terms as a follow-up."""
    question = QUESTIONS[int(random.integers(len(QUESTIONS)))]
    if random.random() >= _FOLLOW_UP_FRACTION:
        return [user(question.format(problem.text))]
    first = Problem(problem.terms[:2])
    follow_up = FOLLOW_UPS[int(random.integers(len(FOLLOW_UPS)))].format(_format_terms(problem.terms[2:]))
    return [user(question.format(first.text)), assistant(answer_directly(first)), user(follow_up)]


def remaining_problem(problem: Problem, messages: list[Message]) -> Problem:
    """What is left to compute in a dialogue: the whole problem, or the follow-up to the total already given."""
    return problem if len(messages) == 1 else Problem((sum(problem.terms[:2]), *problem.terms[2:]))


def solve_step_by_step(problem: Problem) -> str:
    """A reply with every intermediate total, then the answer in GSM8K's form."""
    steps = [
        f"{before}{term:+}={after}"
        for before, term, after in zip(problem.totals, problem.terms[1:], problem.totals[1:], strict=False)
    ]
    return "\n".join([*steps, answer_directly(problem)])


def answer_directly(problem: Problem) -> str:
    """A reply with the answer alone, in GSM8K's form."""
    return f"#### {problem.answer}"


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}
