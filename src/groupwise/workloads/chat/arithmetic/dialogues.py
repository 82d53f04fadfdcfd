"""Problems as dialogues: how they are asked, and the two ways in which the pretraining corpus answers them."""

from __future__ import annotations

import numpy as np

from groupwise.workloads.chat.arithmetic.problems import Problem, Split, draw_problem, signed

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


def worked(problem: Problem) -> str:
    """Every step written out; then the answer in GSM8K's form."""
    steps = [
        f"{before}{term:+}={after}"
        for before, term, after in zip(problem.totals, problem.terms[1:], problem.totals[1:], strict=False)
    ]
    return "\n".join([*steps, f"#### {problem.answer}"])


def at_once(problem: Problem) -> str:
    """The answer alone: all of it has to be worked out before the first digit is written."""
    return f"#### {problem.answer}"


def ask(problem: Problem, random: np.random.Generator) -> list[Message]:
    """A question; or the first half of it, its answer, and the rest as a follow-up."""
    opening = QUESTIONS[int(random.integers(len(QUESTIONS)))]
    if random.random() >= _FOLLOW_UP_SHARE:
        return [user(opening.format(problem.text))]
    first = Problem(problem.terms[:2])
    going_on = FOLLOW_UPS[int(random.integers(len(FOLLOW_UPS)))].format(signed(problem.terms[2:]))
    return [user(opening.format(first.text)), assistant(at_once(first)), user(going_on)]


def continued(problem: Problem, messages: list[Message]) -> Problem:
    """What is left to do: all of it, or what follows after the total that was already said."""
    return problem if len(messages) == 1 else Problem((sum(problem.terms[:2]), *problem.terms[2:]))


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def rows(split: Split, count: int, *, seed: int) -> list[dict[str, object]]:
    """Questions of a split, all different, in the form of a dataset: messages and the right answer."""
    random = np.random.default_rng([seed, *map(ord, split)])
    made: dict[str, dict[str, object]] = {}
    while len(made) < count:
        problem = draw_problem(random, split)
        made.setdefault(problem.text, {"messages": ask(problem, random), "answer": f"#### {problem.answer}"})
    return list(made.values())
