"""Methods that choose a candidate for each question and budget, beside the controller.

    lookup                one candidate per budget: the most accurate on the selection questions
    table_by_first_word   one per budget and first word of the question, chosen on the same questions
    words_classifier      by a predictor that is told the words of the question
    words                 the better of the last two
    one_stage             by a predictor that is told the words and the overview: all is decided before the model runs
    imitation             the controller's network, trained on right answers instead of rewards
    ceiling               by a predictor that is told all that the controller may see
    question_type_oracle  one per budget and question type, chosen on the selection questions
    per_question_oracle   for each question a candidate that answers it rightly, if any: known in hindsight only
    random_feasible       any candidate that fits
    slowest_feasible      the slowest that fits
    cheapest              the fastest of all

Each is charged its own time: a candidate fits if the estimator's upper quantile, less what a controller adds to it and
plus what the method itself takes, is within the budget. That holds for all but `cheapest`, and a controller with soft
enforcement. All but the controller and imitation may choose from each drop order that the task has answers for.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from groupwise.workloads.controller.evaluate.exact import Choices, EvaluationSet, own_candidates
from groupwise.workloads.controller.policy.decide import Controller, greedy_option
from groupwise.workloads.controller.policy.network import ControllerNetwork
from groupwise.workloads.controller.task import Question
from groupwise.workloads.controller.workload import ControllerWorkload

Scores = Float[Tensor, "questions candidates"]
"""How good a method thinks each candidate is; it chooses the best one that fits."""
_IMITATION_ROWS_PER_STEP = 128
_IMITATION_LEARNING_RATE = 1e-3


def choose(
    scores: Scores,
    test_set: EvaluationSet,
    extra_ms: float = 0.0,
    limit_ms: Float[Tensor, "questions limits"] | None = None,
) -> Choices:
    """For each question and limit (the budgets, unless others are given) the best candidate that fits."""
    limit_ms = test_set.budget_ms if limit_ms is None else limit_ms
    chosen = [
        scores.masked_fill(~test_set.feasible(extra_ms, limit_ms[:, [index]])[:, 0], -torch.inf).argmax(1)
        for index in range(limit_ms.shape[1])
    ]
    return torch.stack(chosen, dim=1)


def no_group(question: Question) -> str:
    return ""


def first_word(question: Question) -> str:
    return question.text.split()[0].casefold() if question.text.split() else ""


def question_type(question: Question) -> str:
    return question.question_type


def table_scores(selection_set: EvaluationSet, test_set: EvaluationSet, group_of: Callable[[Question], str]) -> Scores:
    """Candidates by their accuracy on the selection questions of the same group.

    Ties go to the one that is better over all groups, then to the faster. A group without selection questions gets the
    accuracy over all groups.
    """
    groups = [group_of(question) for question in selection_set.questions]
    test_groups = [group_of(question) for question in test_set.questions]
    overall, fast = -selection_set.accuracy.nanmean(0), selection_set.median_ms.mean(0)
    scores = torch.zeros(test_set.accuracy.shape, dtype=torch.float64)
    for group in dict.fromkeys(test_groups):
        inside = torch.tensor([group not in groups or other == group for other in groups])
        best_first = np.lexsort((fast, overall, -selection_set.accuracy[inside].nanmean(0)))
        of_group = torch.empty(len(best_first), dtype=torch.float64)
        of_group[best_first] = -torch.arange(len(best_first), dtype=torch.float64)
        scores[torch.tensor([other == group for other in test_groups])] = of_group
    return scores


def per_question_oracle(test_set: EvaluationSet, extra_ms: float = 0.0) -> Choices:
    """The fastest of the most accurate feasible candidates."""
    feasible = test_set.feasible(extra_ms)
    accuracy = test_set.accuracy.nan_to_num(0.0)[:, None].masked_fill(~feasible, -1)
    best = accuracy == accuracy.amax(2, keepdim=True)
    return test_set.median_ms[:, None].masked_fill(~best, torch.inf).argmin(2)


def random_feasible(test_set: EvaluationSet, extra_ms: float = 0.0, seed: int = 0) -> Choices:
    generator = torch.Generator().manual_seed(seed)
    weights = test_set.feasible(extra_ms).flatten(0, 1).double()
    return torch.multinomial(weights, 1, generator=generator).view(test_set.budget_ms.shape)


def slowest_feasible(test_set: EvaluationSet, extra_ms: float = 0.0) -> Choices:
    return choose(test_set.median_ms, test_set, extra_ms)


def cheapest(test_set: EvaluationSet) -> Choices:
    return test_set.median_ms.argmin(1)[:, None].expand(test_set.budget_ms.shape).contiguous()


@torch.no_grad()
def controller_choices(controller: Controller, test_set: EvaluationSet, rows_per_pass: int = 256) -> Choices:
    """The controller's greedy choices."""
    batches = torch.arange(len(test_set.conditions)).split(rows_per_pass)
    options = torch.cat([controller.decide(test_set.conditions, rows, greedy_option).choices for rows in batches])
    return _configuration_index(options, test_set).view(test_set.budget_ms.shape)


def _configuration_index(options: Int64[Tensor, "rows 4"], test_set: EvaluationSet) -> Int64[Tensor, " rows"]:
    """From the index of an option per knob to that of the configuration."""
    shape = tuple(test_set.conditions.median_ms.shape[1:])
    return torch.from_numpy(np.ravel_multi_index(tuple(options.T.numpy()), shape))


@torch.enable_grad()
def train_imitation(
    workload: ControllerWorkload, training_set: EvaluationSet, *, steps: int, seed: int = 0
) -> Controller:
    """A fresh network that maximizes the log of the probability that it chooses rightly:

        log sum of p(c) over the most accurate feasible configurations c

    on conditions that some feasible configuration answers rightly. It is free which of the right ones it chooses, so it
    can choose one that is right for many questions that look alike.
    """
    trained = workload.controller
    policy = ControllerNetwork(
        trained.hidden_states.width,
        workload.options,
        sees_overview=trained.policy.sees_overview,
        seed=workload.config.policy_seed,
    )
    imitation = Controller(policy.to(trained.device), trained.hidden_states, trained.device)
    right = right_configurations(training_set, len(own_candidates(workload.options)))
    solvable = right.any(1).nonzero()[:, 0]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=_IMITATION_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps if len(solvable) else 0):
        rows = solvable[torch.randint(len(solvable), (_IMITATION_ROWS_PER_STEP,), generator=generator)]
        logp = imitation.configuration_logp(training_set.conditions, rows).flatten(1)
        optimizer.zero_grad()
        (-_logp_of_any(logp, right[rows].to(logp.device)).mean()).backward()
        optimizer.step()
        schedule.step()
    return imitation


def right_configurations(training_set: EvaluationSet, configurations: int) -> Tensor:
    """For each condition the feasible configurations that are as accurate as any, if that is above 0."""
    accuracy = training_set.accuracy[:, None, :configurations].nan_to_num(0.0)
    accuracy = accuracy.masked_fill(~training_set.feasible()[..., :configurations], 0.0)
    best = accuracy.amax(2, keepdim=True)
    return ((accuracy == best) & (best > 0)).flatten(0, 1)


def _logp_of_any(logp: Float[Tensor, "rows configurations"], wanted: Tensor) -> Float[Tensor, " rows"]:
    return logp.masked_fill(~wanted, -torch.inf).logsumexp(1)
