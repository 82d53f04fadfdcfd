"""How right an answer is. Reward functions of TRL's signature, so that a user's own can take their place.
The reward of one answer, as named terms. Latency is the estimator's: the same choice always earns the same.

    accuracy         how right the answer is, 0 to 1
    late_penalty     -0.5 sigmoid(10 (r - 1))                               with soft enforcement only
    overrun_penalty  -10 max(0, r - 1)^2                                    with soft enforcement only
    time_saved       0.1 (1 - r) where r <= 1, else 0                       with soft enforcement only
    compute_cost     -0.05 (crops / most crops + top_k / (4 full top_k) + blocks / all blocks) / 3

r is the estimated median over the budget, both of the same scope. With 12 crops, top-8 and 16 blocks the compute cost
is that of the formula's source, -0.05 (crops / 12 + top_k / 32 + blocks / 16) / 3.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.rewards.call import RewardFunction
from groupwise.workloads.controller.latency.estimates import KnobTable
from groupwise.workloads.controller.model.knobs import KnobOptions

_ARTICLES = {"a", "an", "the"}
_NUMBERS = ["none", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_DIGITS = {word: str(max(0, nth - 1)) for nth, word in enumerate(_NUMBERS)}
MIN_ANNOTATORS = 3


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
    matching = [normalize_answer(answer) == normalize_answer(said) for answer in right]
    count = sum(matching)
    if len(right) != 10:
        return min(1.0, count / 3)
    return sum(min(1.0, (count - own) / 3) for own in matching) / 10


def check_annotators(name: str, answers: Sequence[Sequence[str]]) -> None:
    """Refuse a soft match where too few annotators answered: nobody could be right."""
    fewest = min(len(right) for right in answers)
    if name == "vqa" and fewest < MIN_ANNOTATORS:
        raise UserError(
            f"workload.accuracy is 'vqa', but a question has {fewest} right answers: its score, matching annotators"
            f" / 3, needs at least {MIN_ANNOTATORS} annotators. Use accuracy 'exact' for single answers."
        )


def normalize_answer(text: str) -> str:
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


def cost_table(options: KnobOptions) -> KnobTable:
    """The term `compute_cost` of every configuration."""
    most_crops, most_experts = max(1, *options.crops.values()), 4 * max(1, options.full_top_k)  # dense models have none
    crops = torch.tensor(list(options.crops.values()), dtype=torch.float64) / most_crops
    top_ks = torch.tensor(list(options.top_ks), dtype=torch.float64) / most_experts
    blocks = torch.tensor(list(options.block_totals), dtype=torch.float64) / options.total_blocks
    one = crops[:, None, None, None] + top_ks[:, None] + blocks
    return -0.05 / 3 * one.expand(-1, len(options.insertion_positions), -1, -1)


def penalty_terms(ratio: Float[Tensor, "*rows"]) -> dict[str, Float[Tensor, "*rows"]]:
    """Penalties for exceeding the budget, and a bonus for staying under it."""
    return {
        "late_penalty": -0.5 * torch.sigmoid(10 * (ratio - 1)),
        "overrun_penalty": -10 * (ratio - 1).clamp(min=0) ** 2,
        "time_saved": torch.where(ratio <= 1, 0.1 * (1 - ratio), torch.zeros_like(ratio)),
    }
