"""The number that a text gives as its answer: after GSM8K's `####`, or in LaTeX's \\boxed{}."""

from __future__ import annotations

import re
from fractions import Fraction

_LONGEST_NUMBER = 1000
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)")
_WHOLE = re.compile(r"[-+]?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d*)?|[-+]?\.\d+")
_MARKED = re.compile(r"####[ \t]*([^\n]*)")
_RATIO = re.compile(r"([-+]?)\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}")
_TWO_NUMBERS = re.compile(r"\d\s+[-+]?\.?\d")
_DECORATION = re.compile(r"\\[,;! $%]|[\s$]|\\left|\\right|\{,\}(?=\d{3})")


def given_number(text: str) -> Fraction | None:
    """The answer of a completion: after the last ####, else in the last \\boxed{}; None where there is neither.

    Exactly: 0.5, 1/2 and \\frac{1}{2} are one number, 1,000 and 1000 too.
    """
    marked = _MARKED.findall(text)
    if marked:
        return _leading_number(marked[-1])
    boxed = last_boxed(text)
    return None if boxed is None else as_number(boxed)


def right_number(text: str) -> Fraction | None:
    """The answer of a dataset's column: in the same forms, or the number alone."""
    found = given_number(text)
    return as_number(text) if found is None else found


def last_boxed(text: str) -> str | None:
    """What stands in the last \\boxed{...}, with its braces in balance; None where none is closed."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start:place]
    return None


def as_number(text: str) -> Fraction | None:
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
    whole = as_number(text)
    if whole is not None:
        return whole
    bare = text.strip().lstrip("$").strip()
    found = _NUMBER.match(bare)
    return as_number(found[0]) if found and not _TWO_NUMBERS.match(bare, found.end() - 1) else None
