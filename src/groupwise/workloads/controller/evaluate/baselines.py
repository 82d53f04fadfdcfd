"""Ways to choose a configuration for a question and a budget: baselines and ceilings.

Each returns one configuration for every question and budget. All but `cheapest` and the controller of a penalised
budget are held to the same rule: the estimator's high quantile must fit.

    lookup       one configuration a budget, the most accurate on the questions to choose on
    kind_oracle  one a budget and kind of question, chosen on the same questions: what can be known from the question
    oracle       for every single question one that is right, if there is any: includes luck that nobody can foresee
    random       any that fits
    dearest      the slowest that fits: time as a measure of quality
    cheapest     the fastest of all
Supervised imitation of the oracle: the same network, told what would have been right.

For every training condition that some fitting configuration answers rightly, the target is that one of them which is
right most often on all training questions. The four decisions are trained by cross entropy. It shows what labels are
worth beside rewards: a label names one of many configurations that would have done.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from groupwise.workloads.controller.evaluate.exact import EvaluationSet
from groupwise.workloads.controller.policy.decide import Controller, greedy_option, replay_option
from groupwise.workloads.controller.policy.network import ControllerNetwork
from groupwise.workloads.controller.workload import ControllerWorkload

Choices = Int64[Tensor, "questions budgets"]


def lookup(chosen_on: EvaluationSet, exam: EvaluationSet) -> Choices:
    return _best_by_group(chosen_on, [""] * len(chosen_on.questions), exam, [""] * len(exam.questions))


def kind_oracle(chosen_on: EvaluationSet, exam: EvaluationSet) -> Choices:
    kinds = [question.kind for question in chosen_on.questions]
    known = set(kinds)
    asked = [question.kind if question.kind in known else None for question in exam.questions]
    return _best_by_group(chosen_on, kinds, exam, asked)


def oracle(exam: EvaluationSet) -> Choices:
    """The fastest of those that are most right."""
    right = exam.accuracy.nan_to_num(0.0)[:, None].masked_fill(~exam.fitting, -1)
    best = right == right.amax(2, keepdim=True)
    return exam.median_ms[:, None].masked_fill(~best, torch.inf).argmin(2)


def random_choice(exam: EvaluationSet, seed: int = 0) -> Choices:
    source = torch.Generator().manual_seed(seed)
    chances = exam.fitting.flatten(0, 1).double()
    return torch.multinomial(chances, 1, generator=source).view(exam.budget_ms.shape)


def dearest(exam: EvaluationSet) -> Choices:
    return exam.median_ms[:, None].masked_fill(~exam.fitting, -torch.inf).argmax(2)


def cheapest(exam: EvaluationSet) -> Choices:
    return exam.median_ms.argmin(1)[:, None].expand(exam.budget_ms.shape).contiguous()


def single(exam: EvaluationSet, configuration: int) -> Choices:
    return torch.full(exam.budget_ms.shape, configuration)


@torch.no_grad()
def controlled(controller: Controller, exam: EvaluationSet, rows_per_pass: int = 64) -> Choices:
    """The controller's likeliest choices."""
    rows = torch.arange(len(exam.conditions)).split(rows_per_pass)
    choices = torch.cat([controller.decide(exam.conditions, part, greedy_option).choices for part in rows])
    return numbers_of(choices, exam.conditions.median_ms.shape[1:]).view(exam.budget_ms.shape)


def numbers_of(choices: Int64[Tensor, "rows 4"], shape: tuple[int, ...]) -> Int64[Tensor, " rows"]:
    """Four numbers of options as the number of the configuration."""
    return torch.from_numpy(np.ravel_multi_index(tuple(choices.T.numpy()), tuple(shape)))


def choices_of(numbers: Int64[Tensor, " rows"], shape: tuple[int, ...]) -> Int64[Tensor, "rows 4"]:
    """The inverse of `numbers_of`."""
    return torch.from_numpy(np.stack(np.unravel_index(numbers.numpy(), tuple(shape)), axis=1))


def _best_by_group(
    chosen_on: EvaluationSet, groups: Sequence[str], exam: EvaluationSet, asked: Sequence[str | None]
) -> Choices:
    """For every group and budget its most accurate configuration that fits all its questions.

    Ties go to the one that is better over all groups, then to the faster. A question of a group that was not there to
    choose on gets what is best over all.
    """
    found = torch.zeros(exam.budget_ms.shape, dtype=torch.int64)
    for group in dict.fromkeys(asked):
        inside = torch.tensor([group is None or each == group for each in groups])
        members = torch.tensor([each == group for each in asked])
        for nth in range(found.shape[1]):
            found[members, nth] = _best(chosen_on, inside, nth)
    return found


def _best(exam: EvaluationSet, inside: Bool[Tensor, " questions"], budget: int) -> int:
    highs = exam.upper_ms[inside]
    fits = (highs <= exam.budget_ms[inside, budget, None]).all(0)
    if not fits.any():
        return int(highs.amax(0).argmin())
    order = np.lexsort(
        (exam.median_ms[inside].mean(0), -exam.accuracy.nanmean(0), -exam.accuracy[inside].nanmean(0), ~fits)
    )
    return int(order[0])


_ROWS_PER_STEP = 256
_LEARNING_RATE = 1e-3


def oracle_labels(training: EvaluationSet) -> Choices:
    """Of the most right configurations that fit, the one that is best over all questions; the fastest of equals."""
    right = training.accuracy.nan_to_num(0.0)[:, None].masked_fill(~training.fitting, -1)
    usual = training.accuracy.nanmean(0) - 1e-9 * training.median_ms.mean(0)
    return usual.expand_as(right).masked_fill(right < right.amax(2, keepdim=True), -torch.inf).argmax(2)


@torch.enable_grad()
def train_imitation(workload: ControllerWorkload, training: EvaluationSet, *, steps: int, seed: int = 0) -> Controller:
    """Train a fresh network; the workload's own is left as it is."""
    own = workload.controller
    policy = ControllerNetwork(own.hidden_states.width, workload.options, seed=workload.config.policy_seed).to(
        own.device
    )
    learner = Controller(policy, own.hidden_states, own.device)
    best = oracle_labels(training)
    right = (training.score(best) > 0).flatten().nonzero()[:, 0]
    targets = choices_of(best.flatten(), training.conditions.median_ms.shape[1:])
    optimizer = torch.optim.AdamW(policy.parameters(), lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    source = torch.Generator().manual_seed(seed)
    for _ in range(steps if len(right) else 0):
        rows = right[torch.randint(len(right), (_ROWS_PER_STEP,), generator=source)]
        logp = learner.decide(training.conditions, rows, replay_option(targets[rows])).logp
        optimizer.zero_grad()
        (-logp.sum(1).mean()).backward()
        optimizer.step()
        schedule.step()
    return learner
