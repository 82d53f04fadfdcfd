from dataclasses import dataclass, replace

import pytest
import torch
from fakes import TinyConfig, TinyWorkload, recipe

import groupwise as gw
from groupwise.core.errors import UserError
from groupwise.training.preflight import Check, preflight, refuse_failures
from groupwise.training.run import check, set_up


class WrongTemperature(TinyWorkload):
    def score(self, rollouts):
        return replace(super().score(rollouts), logp=super().score(rollouts).logp * 0.9)


class ForgottenHead(TinyWorkload):
    def score(self, rollouts):
        scored = super().score(rollouts)
        self.policy.head.requires_grad_(True)
        body = self.policy.body(rollouts.data["condition"]).mean(1, keepdim=True)
        return replace(scored, logp=scored.logp.detach() + body - body.detach())


class RedrawnCondition(TinyWorkload):
    def rollout(self, rows):
        rollouts = super().rollout(rows)
        ids = [gw.group_id(int(c), int(m) % 2) for c, m in zip(rows.condition, rows.member, strict=True)]
        return replace(rollouts, group_ids=torch.tensor(ids))


class OneKeyForAll(TinyWorkload):
    def rollout(self, rows):
        rollouts = super().rollout(rows)
        return replace(rollouts, group_ids=torch.zeros_like(rollouts.group_ids))


class NoReference(TinyWorkload):
    def score(self, rollouts):
        return replace(super().score(rollouts), reference_logp=None)


@dataclass(frozen=True)
class BrokenConfig(TinyConfig):
    kind: type = TinyWorkload

    def build(self, device):
        return self.kind(self, device)


def failed_checks(kind):
    checks, _ = check(replace(recipe(), workload=BrokenConfig(kind=kind)))
    return {entry.name: entry.detail for entry in checks if not entry.passed}


def test_a_sound_set_up_passes_all_eight():
    checks, is_main = check(recipe())
    assert is_main
    assert len(checks) == 8
    assert all(entry.passed for entry in checks)


class WithoutGraph(TinyWorkload):
    def score(self, rollouts):
        scored = super().score(rollouts)
        return replace(scored, logp=scored.logp.detach())


class WrongShape(TinyWorkload):
    def score(self, rollouts):
        return replace(super().score(rollouts), logp=super().score(rollouts).logp[:, :2])


class NanReference(TinyWorkload):
    def score(self, rollouts):
        scored = super().score(rollouts)
        return replace(scored, reference_logp=scored.reference_logp * torch.nan)


class NoEntropy(TinyWorkload):
    def score(self, rollouts):
        return replace(super().score(rollouts), entropy=None)


class RaisingReward(TinyWorkload):
    def rewards(self, rollouts):
        raise KeyError("answer")


class RunningNorm(TinyWorkload):
    """A buffer that every rollout advances, and a child in evaluation mode."""

    def __init__(self, config, device):
        super().__init__(config, device)
        self.policy.register_buffer("seen", torch.zeros(1))
        self.policy.body.eval()

    def rollout(self, rows):
        self.policy.seen += len(rows)
        return super().rollout(rows)


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        (WithoutGraph, "every trainable part gets a gradient", "no gradient reaches body.weight"),
        (WrongShape, "ratio is 1 before the first update", "where rollout() gave (4, 3)"),
        (NanReference, "KL has a gradient", "not finite"),
        (NoEntropy, "entropy is given", "gives none"),
        (RaisingReward, "rewards arrive", "rewards() of RaisingReward raised KeyError: 'answer'"),
    ],
)
def test_faults_that_would_otherwise_crash_are_reported(kind, name, says):
    assert says in failed_checks(kind)[name]


def test_preflight_leaves_buffers_and_modes_as_they_were():
    setup = set_up(replace(recipe(), workload=BrokenConfig(kind=RunningNorm)))
    preflight(setup)
    assert setup.workload.policy.seen.item() == 0
    assert setup.workload.policy.training
    assert not setup.workload.policy.body.training


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        (WrongTemperature, "ratio is 1 before the first update", "same temperature"),
        (ForgottenHead, "every trainable part gets a gradient", "head.bias, head.weight"),
        (RedrawnCondition, "members share their condition", "do not share one condition"),
        (OneKeyForAll, "members share their condition", "carry the same id 0"),
        (NoReference, "KL has a gradient", "no reference_logp"),
    ],
)
def test_each_fault_is_found_and_only_it(kind, name, says):
    failed = failed_checks(kind)
    assert list(failed) == [name]
    assert says in failed[name]


def test_training_does_not_start_on_a_failed_check(tmp_path):
    config = replace(recipe(), workload=BrokenConfig(kind=WrongTemperature), run=gw.RunConfig(run_dir=tmp_path / "run"))
    with pytest.raises(UserError, match=r"Preflight failed.*ratio is 1.*--no-preflight"):
        gw.train(config)
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()


def test_refusal_names_only_what_failed():
    checks, _ = check(recipe())
    refuse_failures(checks)
    broken = [*checks, Check("the moon is full", False, "wait for it.")]
    with pytest.raises(UserError, match=r"^Preflight failed\. the moon is full: wait for it\. \(--no-preflight"):
        refuse_failures(broken)
