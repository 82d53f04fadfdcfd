"""Methods that choose a configuration for every question and budget.

    lookup_table          one configuration per budget: the most accurate on the selection questions
    question_type_oracle  one per budget and question type, chosen on the same questions
    per_question_oracle   for each question a configuration that answers it rightly, if any: known in hindsight only
    random_feasible       any configuration that fits
    slowest_feasible      the slowest that fits
    cheapest              the fastest of all
    imitation             the controller's network, trained on labels instead of rewards

A configuration fits if the estimator's upper quantile is within the budget. That holds for all but `cheapest` and a
controller with soft enforcement.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from groupwise.workloads.controller.evaluate.exact import Choices, EvaluationSet
from groupwise.workloads.controller.policy.decide import Controller, greedy_option, replay_option
from groupwise.workloads.controller.policy.network import ControllerNetwork
from groupwise.workloads.controller.workload import ControllerWorkload

_IMITATION_ROWS_PER_STEP = 256
_IMITATION_LEARNING_RATE = 1e-3


def lookup_table(selection_set: EvaluationSet, test_set: EvaluationSet) -> Choices:
    return _best_by_group(selection_set, [""] * len(selection_set.questions), test_set, [""] * len(test_set.questions))


def question_type_oracle(selection_set: EvaluationSet, test_set: EvaluationSet) -> Choices:
    types = [question.question_type for question in selection_set.questions]
    known = set(types)
    test_types = [
        question.question_type if question.question_type in known else None for question in test_set.questions
    ]
    return _best_by_group(selection_set, types, test_set, test_types)


def per_question_oracle(test_set: EvaluationSet) -> Choices:
    """The fastest of the most accurate feasible configurations."""
    accuracy = test_set.accuracy.nan_to_num(0.0)[:, None].masked_fill(~test_set.feasible, -1)
    best = accuracy == accuracy.amax(2, keepdim=True)
    return test_set.median_ms[:, None].masked_fill(~best, torch.inf).argmin(2)


def random_feasible(test_set: EvaluationSet, seed: int = 0) -> Choices:
    generator = torch.Generator().manual_seed(seed)
    weights = test_set.feasible.flatten(0, 1).double()
    return torch.multinomial(weights, 1, generator=generator).view(test_set.budget_ms.shape)


def slowest_feasible(test_set: EvaluationSet) -> Choices:
    return test_set.median_ms[:, None].masked_fill(~test_set.feasible, -torch.inf).argmax(2)


def cheapest(test_set: EvaluationSet) -> Choices:
    return test_set.median_ms.argmin(1)[:, None].expand(test_set.budget_ms.shape).contiguous()


@torch.no_grad()
def controller_choices(controller: Controller, test_set: EvaluationSet, rows_per_pass: int = 64) -> Choices:
    """The controller's greedy choices."""
    batches = torch.arange(len(test_set.conditions)).split(rows_per_pass)
    options = torch.cat([controller.decide(test_set.conditions, rows, greedy_option).choices for rows in batches])
    return _configuration_index(options, test_set).view(test_set.budget_ms.shape)


def _configuration_index(options: Int64[Tensor, "rows 4"], test_set: EvaluationSet) -> Int64[Tensor, " rows"]:
    """From the index of an option per knob to that of the configuration."""
    shape = tuple(test_set.conditions.median_ms.shape[1:])
    return torch.from_numpy(np.ravel_multi_index(tuple(options.T.numpy()), shape))


def _best_by_group(
    selection_set: EvaluationSet,
    selection_groups: Sequence[str],
    test_set: EvaluationSet,
    test_groups: Sequence[str | None],
) -> Choices:
    """For every group and budget the most accurate configuration that fits all its selection questions.

    Ties go to the one that is better over all groups, then to the faster. A group without selection questions (None)
    gets the best one over all groups.
    """
    choices = torch.zeros(test_set.budget_ms.shape, dtype=torch.int64)
    for group in dict.fromkeys(test_groups):
        inside = torch.tensor([group is None or other == group for other in selection_groups])
        members = torch.tensor([other == group for other in test_groups])
        for budget in range(test_set.num_budgets):
            choices[members, budget] = _best(selection_set, inside, budget)
    return choices


def _best(selection_set: EvaluationSet, inside: Bool[Tensor, " questions"], budget: int) -> int:
    uppers = selection_set.upper_ms[inside]
    fits = (uppers <= selection_set.budget_ms[inside, budget, None]).all(0)
    if not fits.any():
        return int(uppers.amax(0).argmin())
    accuracy = selection_set.accuracy
    order = np.lexsort(
        (selection_set.median_ms[inside].mean(0), -accuracy.nanmean(0), -accuracy[inside].nanmean(0), ~fits)
    )
    return int(order[0])


def oracle_labels(training_set: EvaluationSet) -> Choices:
    """Of the most accurate feasible configurations, the one that is best over all questions; the fastest of equals."""
    accuracy = training_set.accuracy.nan_to_num(0.0)[:, None].masked_fill(~training_set.feasible, -1)
    overall = training_set.accuracy.nanmean(0) - 1e-9 * training_set.median_ms.mean(0)
    return overall.expand_as(accuracy).masked_fill(accuracy < accuracy.amax(2, keepdim=True), -torch.inf).argmax(2)


@torch.enable_grad()
def train_imitation(
    workload: ControllerWorkload, training_set: EvaluationSet, *, steps: int, seed: int = 0
) -> Controller:
    """A fresh network trained by cross entropy on `oracle_labels`, on conditions that some configuration gets right."""
    trained = workload.controller
    policy = ControllerNetwork(
        trained.hidden_states.width,
        workload.options,
        sees_overview=trained.policy.sees_overview,
        seed=workload.config.policy_seed,
    )
    imitation = Controller(policy.to(trained.device), trained.hidden_states, trained.device)
    labels = oracle_labels(training_set)
    solvable = (training_set.accuracy_of(labels) > 0).flatten().nonzero()[:, 0]
    shape = tuple(training_set.conditions.median_ms.shape[1:])
    targets = torch.from_numpy(np.stack(np.unravel_index(labels.flatten().numpy(), shape), axis=1))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=_IMITATION_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps if len(solvable) else 0):
        rows = solvable[torch.randint(len(solvable), (_IMITATION_ROWS_PER_STEP,), generator=generator)]
        logp = imitation.decide(training_set.conditions, rows, replay_option(targets[rows])).logp
        optimizer.zero_grad()
        (-logp.sum(1).mean()).backward()
        optimizer.step()
        schedule.step()
    return imitation
