"""Rewards by name, or functions of a user's own, all with TRL's signature.
The number that a text gives as its answer: after GSM8K's `####`, or in LaTeX's \boxed{}.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from groupwise.core.errors import UserError
from groupwise.data.rows import BadRowError, Record
from groupwise.rewards.call import RewardFunction
from groupwise.rewards.time_limit import with_time_limit
from groupwise.workloads.chat.config import JudgeConfig

_LONGEST_NUMBER = 1000
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)")
_WHOLE = re.compile(r"[-+]?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d*)?|[-+]?\.\d+")
_MARKED = re.compile(r"####[ \t]*([^\n]*)")
_RATIO = re.compile(r"([-+]?)\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}")
_TWO_NUMBERS = re.compile(r"\d\s+[-+]?\.?\d")
_DECORATION = re.compile(r"\\[,;! $%]|[\s$]|\\left|\\right|\{,\}(?=\d{3})")


def answer_in_completion(text: str) -> Fraction | None:
    """The answer of a completion: after the last ####, else in the last \\boxed{}; None where there is neither.

    Exactly: 0.5, 1/2 and \\frac{1}{2} are one number, 1,000 and 1000 too.
    """
    marked = _MARKED.findall(text)
    if marked:
        return _leading_number(marked[-1])
    boxed = last_boxed(text)
    return None if boxed is None else parse_number(boxed)


def answer_in_dataset(text: str) -> Fraction | None:
    """The answer of a dataset's column: in the same forms, or the number alone."""
    found = answer_in_completion(text)
    return parse_number(text) if found is None else found


def last_boxed(text: str) -> str | None:
    """What stands in the last \\boxed{...}, with its braces in balance; None where none is closed."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start:place]
    return None


def parse_number(text: str) -> Fraction | None:
    """A text that is a number and nothing else: 12, -3.50, 1,234, $5, 20%, 3/4, \\frac{3}{4}."""
    plain = _DECORATION.sub("", text).rstrip("%").rstrip(".")
    if len(plain) > _LONGEST_NUMBER or _TWO_NUMBERS.search(text):  # digits repeated without end; '5 6' is not 56
        return None
    ratio = _RATIO.fullmatch(plain)
    parts = [ratio[1] + ratio[2], ratio[3]] if ratio else plain.split("/")
    if len(parts) > 2 or not all(_WHOLE.fullmatch(part) for part in parts):
        return None
    numbers = [Fraction(part.replace(",", "").rstrip(".")) for part in parts]
    return None if len(numbers) == 2 and not numbers[1] else numbers[0] / (numbers[1] if len(numbers) == 2 else 1)


def _leading_number(text: str) -> Fraction | None:
    """GSM8K's answers are bare numbers; a unit behind one ('18 dollars') does not make it another.

    Two numbers side by side ('5 6', '3 1/2') are no answer: which of them is meant is anybody's guess.
    """
    whole = parse_number(text)
    if whole is not None:
        return whole
    bare = text.strip().lstrip("$").strip()
    found = _NUMBER.match(bare)
    return parse_number(found[0]) if found and not _TWO_NUMBERS.match(bare, found.end() - 1) else None


Texts = Sequence[Any]
_WITH_ANSWER = ("numeric", "exact")


def reward_functions(config: JudgeConfig, *, max_new_tokens: int) -> dict[str, RewardFunction]:
    """The functions by the name that their rewards are logged and weighted under, each with its time limit."""
    makers: Mapping[str, Callable[[], RewardFunction]] = {
        "numeric": lambda: _numeric(config.answer_column),
        "exact": lambda: _exact(config.answer_column),
        "regex": lambda: _regex(config.pattern),
        "length": lambda: _length(config.longest or max_new_tokens),
    }
    found: dict[str, RewardFunction] = {}
    for spec in config.functions:
        name = spec.rpartition(":")[2]
        if name in found:
            raise UserError(
                f"judge.functions names two rewards '{name}': each is logged by its name. Name one of them otherwise."
            )
        found[name] = with_time_limit(makers[spec]() if spec in makers else own_function(spec, makers), config.seconds)
    return found


def required_columns(config: JudgeConfig) -> tuple[str, ...]:
    """What every row of the dataset must have for these rewards."""
    return (config.answer_column,) if set(config.functions) & set(_WITH_ANSWER) else ()


def check_answer(row: Record, config: JudgeConfig) -> None:
    """Refuse a row whose right answer no completion could ever match."""
    if "numeric" in config.functions and answer_in_dataset(str(row[config.answer_column])) is None:
        raise BadRowError(
            "without a number",
            f"column '{config.answer_column}' is {str(row[config.answer_column])[-60:]!r}, in which the reward"
            " 'numeric' finds no number: give it as '#### 42', '\\boxed{42}' or '42'.",
        )


def own_function(spec: str, known: Mapping[str, Any]) -> RewardFunction:
    """A user's function by `module:function`; the present folder is looked in too."""
    module, _, name = spec.partition(":")
    if not name:
        raise UserError(
            f"judge.functions names '{spec}': it must be one of {', '.join(known)}, or a function of your own, written"
            " as 'module:function'."
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"judge.functions names '{spec}', which cannot be imported ({error}). Check the spelling, and that the"
            " module is on PYTHONPATH or in this folder."
        ) from error
    if not callable(function):
        raise UserError(f"judge.functions names '{spec}', which is {type(function).__name__} and cannot be called.")
    return function


def completion_text(completion: Any) -> str:
    """What was said, whether the completion is a text or a list of messages."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message["content"]) for message in completion)


def _numeric(column: str) -> RewardFunction:
    def numeric(prompts: Texts, completions: Texts, **columns: Any) -> list[float]:
        right = [answer_in_dataset(str(answer)) for answer in columns[column]]
        return [
            float(answer_in_completion(completion_text(said)) == number)
            for said, number in zip(completions, right, strict=True)
        ]

    return numeric


def _exact(column: str) -> RewardFunction:
    def exact(prompts: Texts, completions: Texts, **columns: Any) -> list[float]:
        answers = (str(answer).strip() for answer in columns[column])
        return [
            float(completion_text(said).strip() == answer) for said, answer in zip(completions, answers, strict=True)
        ]

    return exact


def _regex(pattern: str) -> RewardFunction:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UserError(f"judge.pattern is {pattern!r}, which is not a regular expression: {error}.") from error
    if not pattern:
        raise UserError(
            "judge.pattern is empty, and the reward 'regex' needs one: give it with --workload.judge.pattern."
        )

    def found(prompts: Texts, completions: Texts, **columns: Any) -> list[float]:
        return [float(compiled.search(completion_text(said)) is not None) for said in completions]

    return found


def _length(longest: int) -> RewardFunction:
    """1 up to half of `longest` tokens, then falling in a straight line to 0 at `longest`."""

    def length(
        prompts: Texts, completions: Texts, completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float]:
        return [min(1.0, max(0.0, 2 - 2 * len(ids) / longest)) for ids in completion_ids]

    return length
