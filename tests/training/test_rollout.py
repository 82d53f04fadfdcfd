"""Rounds of a step: further conditions for groups without spread, and rewards in whole groups."""

from dataclasses import replace

import pytest
import torch
from fakes import TinyConfig, TinyWorkload, recipe
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import groupwise as gw
from groupwise.core.advantage import group_advantages
from groupwise.core.errors import UserError
from groupwise.core.io.files import read_jsonl
from groupwise.core.placement import Placement, place
from groupwise.core.reward import weigh
from groupwise.core.shape import StepShape
from groupwise.dist.comm import connect
from groupwise.training.loop import training_steps
from groupwise.training.rollout import Round, join_rounds, keep_first_groups, split_by_group
from groupwise.training.run import set_up


@given(st.integers(0, 50), st.integers(0, 9), st.sampled_from(["whole", "spread", "shuffled"]))
@settings(max_examples=30)
def test_the_rounds_of_a_step_draw_no_condition_twice_and_share_no_group(step, seed, kind):
    shape = StepShape(25, 4, 2, ranks=2, rows_per_pass=2, placement=kind)
    rounds = [place(shape, seed=seed, step=step, round_index=index, rounds=3) for index in range(3)]
    conditions = torch.cat([placement.condition.unique() for placement in rounds])
    groups = torch.cat([placement.group.unique() for placement in rounds])
    assert len(conditions.unique()) == len(groups.unique()) == 12
    following = place(shape, seed=seed, step=step + 1, round_index=0, rounds=3)
    assert following.group.min() == groups.max() + 1


def test_the_first_groups_with_spread_are_kept_and_the_others_counted():
    shape = StepShape(9, 2, 2)
    group = torch.arange(4).repeat_interleave(2)
    placed = Placement(shape, 0, 0, group, torch.tensor([0, 1] * 4), group)
    rewards = torch.tensor([1.0, 1, 0, 1, 1, 0, 0, 1])
    config = replace(recipe(), conditions_per_step=2, refill=1)
    mask = torch.ones(8, 1, dtype=torch.bool)
    rollouts = gw.Rollouts(group, torch.zeros(8, 1), mask)
    batch = Round(placed, rollouts, group, weigh(gw.RewardTerms({"right": rewards}), gw.RewardConfig()))
    advantages = group_advantages(rewards, group, gw.AdvantageConfig(kind="centered"))
    assert keep_first_groups(advantages, batch, replace(config, refill=0), connect()) == (advantages, {})
    advantages, dropped = keep_first_groups(advantages, batch, config, connect())
    assert advantages.values.tolist() == [0, 0, -0.5, 0.5, 0.5, -0.5, 0, 0]
    assert advantages.trained.tolist() == [False, False, True, True, True, True, False, False]
    assert dropped == {
        "groups_sampled": 4,
        "groups_dropped_without_spread": 1,
        "groups_dropped_surplus": 1,
    }


def test_rounds_are_joined_rank_by_rank_and_one_round_stays_as_it_is():
    shape = StepShape(9, 2, 2, ranks=2)

    def round_of(index):
        placement = place(shape, seed=0, step=0, round_index=index, rounds=2)
        rank_rows = placement.rows_of(0)
        rollouts = gw.Rollouts(rank_rows.group, torch.zeros(2, 1 + index), torch.ones(2, 1 + index, dtype=torch.bool))
        terms = gw.RewardTerms({"right": placement.member.double()}, per_decision={"step": torch.ones(4, 3)})
        return Round(placement, rollouts, placement.group, weigh(terms, gw.RewardConfig()))

    rounds = [round_of(0), round_of(1)]
    assert join_rounds(rounds[:1]) is rounds[0]
    joined = join_rounds(rounds)
    assert joined.placement.rounds == 2
    assert joined.group_ids.tolist() == joined.placement.group.tolist() == [0, 0, 2, 2, 1, 1, 3, 3]
    assert joined.rollouts.group_ids.tolist() == [0, 0, 2, 2], "this rank's rows come first"
    assert joined.rollouts.mask.sum(1).tolist() == [1, 1, 2, 2]
    assert joined.rewards.total.tolist() == joined.rewards.terms.per_rollout["right"].tolist() == [0, 1] * 4
    assert joined.rewards.per_decision.shape == (8, 3)


class SpreadAtTimes(TinyWorkload):
    """Only conditions divisible by 3 are worth telling apart."""

    def rewards(self, rollouts):
        terms = super().rewards(rollouts)
        flat = rollouts.data["condition"] % 3 != 0
        return gw.RewardTerms({name: values.masked_fill(flat, 0.0) for name, values in terms.per_rollout.items()})


class Config(TinyConfig):
    def build(self, device):
        return SpreadAtTimes(self, device)


def steps_of(config):
    setup = set_up(config)
    steps = list(training_steps(setup))
    weights = torch.cat([weight.detach().flatten() for weight in setup.workload.policy.parameters()])
    return steps, weights


def small(**changes):
    return replace(recipe(), workload=Config(), conditions_per_step=4, steps=4, **changes)


def test_refilled_steps_train_more_groups_and_say_what_was_dropped():
    plain, _ = steps_of(small())
    filled, _ = steps_of(small(refill=2))
    trained = [[step.metrics["trained_rollouts"] for step in steps] for steps in (plain, filled)]
    assert sum(trained[1]) > sum(trained[0])
    assert max(trained[1]) <= 4 * recipe().group_size
    for step in filled:
        tried, without = step.metrics["groups_sampled"], step.metrics["groups_dropped_without_spread"]
        assert tried in (4, 8, 12)
        assert step.metrics["zero_spread_share"] == pytest.approx(without / tried)
    assert "groups_sampled" not in plain[0].metrics


class MutedAtTimes(SpreadAtTimes):
    """Of the conditions worth telling apart, the even ones are masked whole (as truncated answers can be)."""

    def rollout(self, rows):
        rollouts = super().rollout(rows)
        return replace(rollouts, mask=rollouts.mask & (rows.condition % 2 != 0)[:, None])

    def rewards(self, rollouts):
        heard = replace(rollouts, mask=torch.ones_like(rollouts.mask))
        return super().rewards(heard)


class MutedConfig(TinyConfig):
    def build(self, device):
        return MutedAtTimes(self, device)


def test_a_group_that_is_masked_whole_takes_no_place_and_is_replaced():
    filled, _ = steps_of(replace(small(refill=3), workload=MutedConfig()))
    for step in filled:
        metrics = step.metrics
        left = metrics["groups_sampled"] - metrics["groups_dropped_without_spread"]
        kept = left - metrics["groups_dropped_surplus"]
        assert metrics["trained_rollouts"] == kept * recipe().group_size
        assert kept == 4 or metrics["groups_sampled"] == 16, "further rounds until four groups can be trained"
    assert any(step.metrics["groups_sampled"] > 4 for step in filled)


def test_what_is_refilled_does_not_depend_on_placement_or_pass_size():
    whole, weights = steps_of(small(refill=2))
    other, others = steps_of(small(refill=2, placement="shuffled", rows_per_pass=1))
    assert_close(weights, others, rtol=0, atol=1e-9)
    for one, two in zip(whole, other, strict=True):
        assert one.metrics["groups_sampled"] == two.metrics["groups_sampled"]
        assert one.metrics["reward"] == pytest.approx(two.metrics["reward"])


def test_a_resumed_run_refills_alike(tmp_path):
    for name, lasts in (("straight", (4,)), ("stopped", (2, 4))):
        for last in lasts:
            run = replace(recipe().run, run_dir=tmp_path / name, resume=True)
            steady = replace(recipe().optimizer, schedule="constant")
            gw.train(replace(small(refill=1, run=run, optimizer=steady), steps=last))
    rewards = [[e["reward"] for e in read_jsonl(tmp_path / name / "metrics.jsonl")] for name in ("straight", "stopped")]
    assert rewards[0] == rewards[1]


def test_a_dataset_too_small_for_the_rounds_is_refused():
    with pytest.raises(UserError, match=r"refill is 8, so .* 9 x conditions_per_step 4 = 36 .*Take refill 4 or less"):
        set_up(small(refill=8))
    with pytest.raises(UserError, match="refill is -1: it must be from 0 to 1,000"):
        small(refill=-1)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=24), st.integers(1, 30))
def test_splits_keep_groups_whole_and_lose_no_row(ids, rows):
    splits = list(split_by_group(torch.tensor(ids), rows))
    assert sorted(torch.cat(splits).tolist()) == list(range(len(ids)))
    groups = [{ids[row] for row in split.tolist()} for split in splits]
    assert sum(map(len, groups)) == len(set(ids))
    assert all(len(split) <= rows or len(ids_in) == 1 for split, ids_in in zip(splits, groups, strict=True))
