"""The reward terms of an answer: accuracy (exact, vqa, or a user's function), and what its configuration costs.

    accuracy         how right the answer is, 0 to 1
    late_penalty     -0.5 sigmoid(10 (r - 1))                               with soft enforcement only
    overrun_penalty  -10 max(0, r - 1)^2                                    with soft enforcement only
    time_saved       0.1 (1 - r) where r <= 1, else 0                       with soft enforcement only
    compute_cost     -0.05 (crops / most crops + top_k / (4 full top_k) + blocks / all blocks) / 3

r is the estimated median over the budget, both of the same scope. With 12 crops, top-8 and 16 blocks the compute cost
is that of the formula's source, -0.05 (crops / 12 + top_k / 32 + blocks / 16) / 3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.types import RewardTerms
from groupwise.rewards.call import RewardFunction, call_rewards
from groupwise.rewards.config import SETTING, RewardFunctionsConfig
from groupwise.rewards.load import load_reward_functions
from groupwise.workloads.controller.latency.estimates import KnobTable
from groupwise.workloads.controller.model.knobs import KnobOptions
from groupwise.workloads.controller.task import Question

_ARTICLES = {"a", "an", "the"}
_NUMBERS = ["none", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_DIGITS = {word: str(max(0, index - 1)) for index, word in enumerate(_NUMBERS)}
MIN_ANNOTATORS = 3
ACCURACY = "accuracy"
"""The reward that evaluation reports, and the name of a function that has none."""


def exact(
    prompts: Sequence[Any], completions: Sequence[str], answers: Sequence[Sequence[str]], **_: Any
) -> list[float]:
    """1 if the completion is one of the right answers, ignoring case and surrounding blanks; else 0."""
    return [
        float(completion.strip().casefold() in {answer.strip().casefold() for answer in right})
        for completion, right in zip(completions, answers, strict=True)
    ]


def vqa(prompts: Sequence[Any], completions: Sequence[str], answers: Sequence[Sequence[str]], **_: Any) -> list[float]:
    """Soft match with several annotators: min(1, annotators who gave the same answer / 3).

    With 10 annotators it is the official score: the mean of that over the ten ways to leave one of them out (Antol et
    al., "VQA: Visual Question Answering", arXiv 1505.00468).
    """
    return [_soft_match(completion, right) for completion, right in zip(completions, answers, strict=True)]


def _soft_match(completion: str, right: Sequence[str]) -> float:
    matching = [normalize_answer(answer) == normalize_answer(completion) for answer in right]
    count = sum(matching)
    if len(right) != 10:
        return min(1.0, count / 3)
    return sum(min(1.0, (count - own) / 3) for own in matching) / 10


def check_annotators(config: RewardFunctionsConfig, answers: Sequence[Sequence[str]]) -> None:
    """Refuse a soft match where too few annotators answered: no answer could get the full score."""
    fewest = min(len(right) for right in answers)
    if "vqa" in config.sources and fewest < MIN_ANNOTATORS:
        raise UserError(
            f"{SETTING}.functions has 'vqa', but a question has {fewest} right answers: its score, matching"
            f" annotators / 3, needs at least {MIN_ANNOTATORS} annotators. Use 'exact' for single answers."
        )


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation and articles, small numbers as digits: the core of the official clean-up."""
    without_stops = re.sub(r"(?<!\d)\.|\.(?!\d)|'", "", text.lower())
    words = re.sub(r"[^\w\s.:]", " ", without_stops).split()
    return " ".join(_DIGITS.get(word, word) for word in words if word not in _ARTICLES)


def reward_functions(config: RewardFunctionsConfig) -> dict[str, RewardFunction]:
    """The functions of answers by name, among them the accuracy."""
    built_in = {"exact": lambda: exact, "vqa": lambda: vqa}
    functions = load_reward_functions(config, built_in=built_in, default_name=ACCURACY)
    if ACCURACY not in functions:
        raise UserError(
            f"{SETTING}.functions has no reward called '{ACCURACY}', only {', '.join(functions)}: evaluation needs it."
            " Give one function without a name, or name it accuracy=FUNCTION."
        )
    return functions


def grade_questions(config: RewardFunctionsConfig) -> Callable[[Sequence[Question], Sequence[str]], Tensor]:
    """A function of questions and answers: the accuracy of each, nan where it is missing."""
    functions = reward_functions(config)

    def grade(questions: Sequence[Question], answers: Sequence[str]) -> Tensor:
        check_annotators(config, [question.answers for question in questions])
        return grade_answers(functions, questions, answers).per_rollout[ACCURACY]

    return grade


def grade_answers(
    functions: Mapping[str, RewardFunction], questions: Sequence[Question], answers: Sequence[str]
) -> RewardTerms:
    """Accuracy and any further reward of each answer; missing where a function failed."""
    return call_rewards(
        functions,
        [question.text for question in questions],
        list(answers),
        answers=[list(question.answers) for question in questions],
        images=[question.image for question in questions],
    )


def cost_table(options: KnobOptions) -> KnobTable:
    """The term `compute_cost` of every configuration."""
    most_crops = max(1, *options.crops_by_tier.values())
    most_experts = 4 * max(1, options.full_top_k)  # dense models have none
    crops = torch.tensor(list(options.crops_by_tier.values()), dtype=torch.float64) / most_crops
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
