"""How right an answer is. Reward functions of TRL's signature, so that a user's own can take their place."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from groupwise.core.errors import UserError
from groupwise.workloads.judge import RewardFunction

_ARTICLES = {"a", "an", "the"}
_NUMBERS = ["none", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_DIGITS = {word: str(max(0, nth - 1)) for nth, word in enumerate(_NUMBERS)}
FEWEST_ANNOTATORS = 3


def exact(
    prompts: Sequence[Any], completions: Sequence[str], answers: Sequence[Sequence[str]], **_: Any
) -> list[float]:
    """1 if the answer is one of the right ones, blanks at the ends and case apart; else 0."""
    return [
        float(said.strip().casefold() in {answer.strip().casefold() for answer in right})
        for said, right in zip(completions, answers, strict=True)
    ]


def vqa(prompts: Sequence[Any], completions: Sequence[str], answers: Sequence[Sequence[str]], **_: Any) -> list[float]:
    """Soft match with several annotators: min(1, annotators who said the same / 3).

    With 10 annotators it is the official score: the mean of that over the ten ways to leave one of them out (Antol et
    al., "VQA: Visual Question Answering", arXiv 1505.00468).
    """
    return [_soft_match(said, right) for said, right in zip(completions, answers, strict=True)]


def _soft_match(said: str, right: Sequence[str]) -> float:
    matching = [plain(answer) == plain(said) for answer in right]
    count = sum(matching)
    if len(right) != 10:
        return min(1.0, count / 3)
    return sum(min(1.0, (count - own) / 3) for own in matching) / 10


def check_annotators(name: str, answers: Sequence[Sequence[str]]) -> None:
    """Refuse a soft match where too few annotators answered: nobody could be right."""
    fewest = min(len(right) for right in answers)
    if name == "vqa" and fewest < FEWEST_ANNOTATORS:
        raise UserError(
            f"workload.accuracy is 'vqa', but a question has {fewest} right answers: its score, matching annotators"
            f" / 3, needs at least {FEWEST_ANNOTATORS} annotators. Use accuracy 'exact' for single answers."
        )


def plain(text: str) -> str:
    """Lower case, without punctuation and articles, small numbers as digits: the core of the official clean-up."""
    without_stops = re.sub(r"(?<!\d)\.|\.(?!\d)|'", "", text.lower())
    words = re.sub(r"[^\w\s.:]", " ", without_stops).split()
    return " ".join(_DIGITS.get(word, word) for word in words if word not in _ARTICLES)


def accuracy_function(name: str) -> RewardFunction:
    """One of the two, or a user's own as `module:function`."""
    known: dict[str, RewardFunction] = {"exact": exact, "vqa": vqa}
    if name in known:
        return known[name]
    module, _, function = name.partition(":")
    if not function:
        raise UserError(
            f"workload.accuracy is '{name}': it must be one of {', '.join(known)}, or a function of your own written as"
            " 'module:function' that takes (prompts, completions, answers, **columns) and returns a number a row."
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: RewardFunction = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"workload.accuracy is '{name}', which cannot be imported ({error}). Check the spelling, and that the"
            " module is on PYTHONPATH."
        ) from error
    return found
