"""Supervised imitation of the oracle: the same network, told what would have been right.

For every training condition that some fitting configuration answers rightly, the target is that one of them which is
right most often on all training questions. The four decisions are trained by cross entropy. It shows what labels are
worth beside rewards: a label names one of many configurations that would have done.
"""

from __future__ import annotations

import torch

from groupwise.workloads.controller.decisions import Controller, repeated
from groupwise.workloads.controller.policy import Policy
from groupwise.workloads.controller.validate.exam import Exam
from groupwise.workloads.controller.validate.methods import Choices, choices_of
from groupwise.workloads.controller.workload import ControllerWorkload

_ROWS_PER_STEP = 256
_LEARNING_RATE = 1e-3


def labels(training: Exam) -> Choices:
    """Of the most right configurations that fit, the one that is best over all questions; the fastest of equals."""
    right = training.accuracy.nan_to_num(0.0)[:, None].masked_fill(~training.fitting, -1)
    usual = training.accuracy.nanmean(0) - 1e-9 * training.median_ms.mean(0)
    return usual.expand_as(right).masked_fill(right < right.amax(2, keepdim=True), -torch.inf).argmax(2)


@torch.enable_grad()
def imitate(workload: ControllerWorkload, training: Exam, *, steps: int, seed: int = 0) -> Controller:
    """Train a fresh network; the workload's own is left as it is."""
    own = workload.controller
    policy = Policy(own.features.width, workload.options, seed=workload.config.policy_seed).to(own.device)
    learner = Controller(policy, own.features, own.device)
    best = labels(training)
    right = (training.score(best) > 0).flatten().nonzero()[:, 0]
    targets = choices_of(best.flatten(), training.conditions.median_ms.shape[1:])
    optimiser = torch.optim.AdamW(policy.parameters(), lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, steps))
    source = torch.Generator().manual_seed(seed)
    for _ in range(steps if len(right) else 0):
        rows = right[torch.randint(len(right), (_ROWS_PER_STEP,), generator=source)]
        logp = learner.decide(training.conditions, rows, repeated(targets[rows])).logp
        optimiser.zero_grad()
        (-logp.sum(1).mean()).backward()
        optimiser.step()
        schedule.step()
    return learner
