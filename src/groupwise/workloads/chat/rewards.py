"""The built-in rewards numeric, exact, regex and length, and how the final answer of a text is parsed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from groupwise.core.errors import UserError
from groupwise.data.rows import BadRow, Record
from groupwise.rewards.call import RewardFunction
from groupwise.rewards.load import load_reward_functions
from groupwise.workloads.chat.config import ChatRewardsConfig

Texts = Sequence[Any]
_WITH_ANSWER = ("numeric", "exact")

_MAX_DIGITS = 1000
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
    """The answer in a dataset's column: in the same forms, or the number alone."""
    answer = answer_in_completion(text)
    return parse_number(text) if answer is None else answer


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} whose braces balance; None where there is none."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for index in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            if depth == 0:
                return text[start:index]
    return None


def parse_number(text: str) -> Fraction | None:
    """A text that is a number and nothing else: 12, -3.50, 1,234, $5, 20%, 3/4, \\frac{3}{4}."""
    plain = _DECORATION.sub("", text).rstrip("%").rstrip(".")
    if len(plain) > _MAX_DIGITS or _TWO_NUMBERS.search(text):  # digits repeated without end; '5 6' is not 56
        return None
    ratio = _RATIO.fullmatch(plain)
    parts = [ratio[1] + ratio[2], ratio[3]] if ratio else plain.split("/")
    if len(parts) > 2 or not all(_WHOLE.fullmatch(part) for part in parts):
        return None
    numbers = [Fraction(part.replace(",", "").rstrip(".")) for part in parts]
    return None if len(numbers) == 2 and not numbers[1] else numbers[0] / (numbers[1] if len(numbers) == 2 else 1)


def _leading_number(text: str) -> Fraction | None:
    """GSM8K's answers are bare numbers; a unit after one ('18 dollars') is ignored.

    Two numbers side by side ('5 6', '3 1/2') are no answer: it is unclear which is meant.
    """
    whole = parse_number(text)
    if whole is not None:
        return whole
    bare = text.strip().lstrip("$").strip()
    number = _NUMBER.match(bare)
    return parse_number(number[0]) if number and not _TWO_NUMBERS.match(bare, number.end() - 1) else None


def reward_functions(config: ChatRewardsConfig, *, max_new_tokens: int) -> dict[str, RewardFunction]:
    """The functions by the name that their rewards are logged and weighted under, each with its time limit."""
    built_in = {
        "numeric": lambda: _numeric(config.answer_column),
        "exact": lambda: _exact(config.answer_column),
        "regex": lambda: _regex(config.regex),
        "length": lambda: _length(config.max_length or max_new_tokens),
    }
    return load_reward_functions(config, built_in=built_in)


def required_columns(config: ChatRewardsConfig) -> tuple[str, ...]:
    """Columns that every row of the dataset must have for these rewards."""
    return (config.answer_column,) if set(config.sources) & set(_WITH_ANSWER) else ()


def check_answer(row: Record, config: ChatRewardsConfig) -> None:
    """Refuse a row whose answer no completion could ever match."""
    if "numeric" in config.sources and answer_in_dataset(str(row[config.answer_column])) is None:
        raise BadRow(
            "without a number",
            f"column '{config.answer_column}' is {str(row[config.answer_column])[-60:]!r}, in which the reward"
            " 'numeric' finds no number: give it as '#### 42', '\\boxed{42}' or '42'.",
        )


def completion_text(completion: Any) -> str:
    """The text of a completion, which is a text or a list of messages."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message["content"]) for message in completion)


def _numeric(column: str) -> RewardFunction:
    def numeric(prompts: Texts, completions: Texts, **columns: Any) -> list[float]:
        answers = [answer_in_dataset(str(answer)) for answer in columns[column]]
        return [
            float(answer_in_completion(completion_text(completion)) == answer)
            for completion, answer in zip(completions, answers, strict=True)
        ]

    return numeric


def _exact(column: str) -> RewardFunction:
    def exact(prompts: Texts, completions: Texts, **columns: Any) -> list[float]:
        answers = [str(answer).strip() for answer in columns[column]]
        return [
            float(completion_text(completion).strip() == answer)
            for completion, answer in zip(completions, answers, strict=True)
        ]

    return exact


def _regex(pattern: str) -> RewardFunction:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UserError(f"rewards.regex is {pattern!r}, which is not a regular expression: {error}.") from error
    if not pattern:
        raise UserError(
            "rewards.regex is empty, and the reward 'regex' needs one: give it with --workload.rewards.regex."
        )

    def regex(prompts: Texts, completions: Texts, **columns: Any) -> list[float]:
        return [float(compiled.search(completion_text(completion)) is not None) for completion in completions]

    return regex


def _length(max_length: int) -> RewardFunction:
    """1 up to half of `max_length` tokens, then falling linearly to 0 at `max_length`."""

    def length(
        prompts: Texts, completions: Texts, completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float]:
        return [min(1.0, max(0.0, 2 - 2 * len(ids) / max_length)) for ids in completion_ids]

    return length
