from dataclasses import dataclass, replace

import pytest
import torch
from fakes import TinyConfig, TinyWorkload, recipe

from groupwise.core.errors import UserError
from groupwise.core.placement import place
from groupwise.training.loop import training_steps
from groupwise.training.rollout import generate_rollouts
from groupwise.training.run import set_up
from groupwise.training.update import StepTotals, TrainingBatch


class OwnPasses(TinyWorkload):
    """Scores the odd rows first, in passes of uneven size."""

    seen = 0

    def passes(self, rollouts, rows_per_pass):
        rows = torch.arange(len(rollouts))
        for part in (rows[1::2], rows[::2]):
            yield from part.split(max(1, rows_per_pass - 1))

    def score(self, rollouts):
        self.seen += 1
        return super().score(rollouts)


class LosesRows(TinyWorkload):
    def passes(self, rollouts, rows_per_pass):
        return torch.arange(len(rollouts) - 1).split(rows_per_pass)


@dataclass(frozen=True)
class OwnConfig(TinyConfig):
    broken: bool = False

    def build(self, device):
        return (LosesRows if self.broken else OwnPasses)(self, device)


def batch_of(config):
    setup = set_up(config)
    rollouts = generate_rollouts(setup, place(setup.shape, seed=0, step=0))
    idle = rollouts.select(torch.arange(1))
    return setup, TrainingBatch(rollouts, torch.arange(len(rollouts)), StepTotals(1, 1), idle)


def test_a_workload_may_split_its_passes_itself():
    setup, batch = batch_of(replace(recipe(), workload=OwnConfig()))
    passes = batch.passes(setup.workload, 8, setup.comm)
    assert [rows.tolist() for rows in passes][:2] == [[1, 3, 5, 7, 9, 11, 13], [15, 17, 19, 21, 23, 25, 27]]
    for rows in passes:
        torch.testing.assert_close(batch.select(rows).logp, batch.rollouts.logp[rows])


def test_rows_that_no_pass_holds_are_refused():
    setup, batch = batch_of(replace(recipe(), workload=OwnConfig(broken=True)))
    with pytest.raises(UserError, match="passes\\(\\) of LosesRows returned 31 rows for 32"):
        batch.passes(setup.workload, 8, setup.comm)


def test_the_order_of_passes_does_not_change_the_run():
    metrics = []
    for workload in (TinyConfig(), OwnConfig()):
        setup = set_up(replace(recipe(), workload=workload, steps=2))
        metrics.append((setup, [step.metrics for step in training_steps(setup)]))
    (_, plain), (setup, own) = metrics
    assert setup.workload.seen > 5
    assert own[-1]["loss"] == pytest.approx(plain[-1]["loss"], abs=1e-9)
    assert own[-1]["grad_norm"] == pytest.approx(plain[-1]["grad_norm"], rel=1e-6)
