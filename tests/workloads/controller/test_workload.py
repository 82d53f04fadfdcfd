"""The controller as a workload: the laws hold for it, hard budgets hold, and the expected reward is exact."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import TESTS, on_ranks
from tiny.controller import EXECUTOR, LinearCost, SmallConfig, recipe
from tiny.llava import OPTIONS
from torch.testing import assert_close

import groupwise as gw
from groupwise.core.io.files import read_jsonl
from groupwise.core.placement import RolloutRows
from groupwise.core.reward import weigh
from groupwise.workloads.controller.conditions import make_conditions
from groupwise.workloads.controller.config import BudgetConfig
from groupwise.workloads.controller.evaluate.exact import best_reward, expected_reward, reward_of_configurations
from groupwise.workloads.controller.policy.decide import choices_to_knobs, greedy_option, replay_option, sample_option
from workloads.controller.ranks import outcome

CPU = torch.device("cpu")
GOLDEN = TESTS / "golden" / "controller.json"
ACCURACY_ALONE = {"compute_cost": 0.0}


def built(**budget):
    return SmallConfig(budget=BudgetConfig(**budget)).build(CPU)


@pytest.fixture(scope="module")
def workload():
    return built(values=(0.6, 0.9))


def rows_of(conditions, members, rows_per_pass=1000):
    condition = torch.arange(conditions).repeat_interleave(members)
    return RolloutRows(5, 0, rows_per_pass, condition, torch.arange(members).repeat(conditions), condition)


def test_a_rollout_is_four_decisions_that_score_the_same_again(workload):
    rollouts = workload.rollout(rows_of(16, 4))
    assert rollouts.logp.shape == (64, 4)
    scored = workload.score(rollouts)
    assert torch.equal(scored.logp, rollouts.logp)
    some = torch.tensor([40, 3, 17])
    assert_close(workload.score(rollouts.select(some)).logp, rollouts.logp[some], rtol=0, atol=1e-5)
    assert (rollouts.logp[~rollouts.mask] == 0).all()
    assert (rollouts.logp[rollouts.mask] < 0).all()


def test_the_cut_changes_nothing_and_a_row_does_not_see_its_neighbours(workload):
    whole, cut = workload.rollout(rows_of(16, 4)), workload.rollout(rows_of(16, 4, rows_per_pass=3))
    assert torch.equal(whole.data["choices"], cut.data["choices"])
    assert whole.data["answer"] == cut.data["answer"]
    other = built(values=(0.6, 0.9))
    other.rollout(
        RolloutRows(5, 0, 2, *(torch.tensor([each, 0]) for each in (9, 0, 9)))
    )  # the same states, in another order
    alone, together = (
        each.controller.hidden_states.latency_tokens(each.training.questions, torch.full((8,), 2), torch.full((8,), 1))[
            0
        ]
        for each in (other, workload)
    )
    assert torch.equal(alone, together)
    assert_close(whole.logp, cut.logp, rtol=0, atol=1e-5)


@given(st.floats(0.3, 1.3), st.integers(0, 1000), st.sampled_from(["total", "first_token"]))
@settings(max_examples=40)
def test_with_hard_enforcement_no_sample_is_estimated_over_budget(workload, fraction, seed, scope):
    config = BudgetConfig(values=(fraction,), scope=scope, on_infeasible="cheapest")
    conditions = make_conditions(workload.training.questions, LinearCost(), OPTIONS, config)
    chances = torch.rand(8, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for pick in (sample_option(chances), greedy_option):
        choices = workload.controller.decide(conditions, torch.arange(8), pick).choices
        for nth, knobs in enumerate(choices_to_knobs(OPTIONS, choices)):
            upper_ms = LinearCost().one(knobs).upper_ms - (7 if scope == "first_token" else 0)
            if conditions.infeasible[nth]:
                assert choices[nth].tolist() == [0, 0, 0, 0]
            else:
                assert upper_ms <= conditions.budget_ms[nth]


def test_soft_enforcement_allows_everything_and_penalizes_the_overrun():
    free = built(values=(0.5,), enforcement="soft")
    assert free.training.feasible(torch.arange(8)).all()
    rollouts = free.rollout(rows_of(8, 8))
    terms = free.rewards(rollouts)
    assert list(terms.per_rollout) == ["accuracy", "late_penalty", "overrun_penalty", "time_saved", "compute_cost"]
    for row, knobs in enumerate(choices_to_knobs(OPTIONS, rollouts.data["choices"])):
        ratio = LinearCost().one(knobs).total_ms / 80.5
        assert terms.per_rollout["overrun_penalty"][row].item() == pytest.approx(-10 * max(0, ratio - 1) ** 2)
    assert free.held_out.over_budget(torch.arange(4), torch.full((4, 4), 2)).all()


def test_rewards_are_of_the_choice_alone_so_equal_accuracy_is_no_advantage(workload):
    rollouts = workload.rollout(rows_of(16, 8))
    once, again = (weigh(workload.rewards(rollouts), gw.RewardConfig(weights=ACCURACY_ALONE)).total for _ in range(2))
    assert torch.equal(once, again)
    assert set(once.tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("enforcement", ["hard", "soft"])
def test_expected_reward_is_the_mean_of_what_is_drawn(enforcement):
    workload = built(values=(0.6, 0.9), enforcement=enforcement)
    rows = torch.arange(16)
    expected = expected_reward(workload, workload.training, rows)
    members = 400
    drawn = weigh(workload.rewards(workload.rollout(rows_of(16, members))), gw.RewardConfig()).total.view(16, members)
    error = drawn.std(1) / members**0.5
    assert ((drawn.mean(1) - expected.detach()).abs() < 4 * error + 1e-6).all()
    assert (expected <= best_reward(workload, workload.training, rows) + 1e-6).all()
    chances = workload.controller.configuration_logp(workload.training, rows).exp()
    assert_close(chances.flatten(1).sum(1), torch.ones(16))
    assert not chances[~workload.training.feasible(rows)].any()


def test_a_path_is_the_product_of_its_decisions_and_blocks_come_before_the_top_k():
    workload = built(values=(0.6, 0.9))
    training, controller = workload.training, workload.controller
    fitting = training.feasible(torch.arange(4)).nonzero()
    rows, choices = fitting[:, 0], fitting[:, 1:]
    decided = controller.decide(training, rows, replay_option(choices))
    paths = controller.configuration_logp(training, torch.arange(4))
    assert_close(decided.logp.sum(1), paths[(rows, *choices.unbind(1))], rtol=0, atol=1e-5)
    # At one tier and position few blocks go with a large top-k, or many with a small one: blocks alone are free.
    two = torch.full_like(training.upper_ms, torch.inf)
    two[:, 0, 0, 1, 0] = two[:, 0, 0, 0, 1] = 1e-9
    (free,) = controller.decide(replace(training, upper_ms=two), torch.tensor([0]), greedy_option).has_choice
    assert free.tolist() == [False, False, False, True]


def test_the_exact_gradient_is_the_mean_of_the_sampled_one():
    workload = built(values=(0.9,))
    members, weights = 1500, workload.policy.stage_two.blocks.linear.weight
    (exact,) = torch.autograd.grad(expected_reward(workload, workload.training, torch.arange(2)).sum(), weights)
    rollouts = workload.rollout(rows_of(2, members))
    rewards = weigh(workload.rewards(rollouts), gw.RewardConfig()).total.view(2, members)
    centered = (rewards - rewards.mean(1, keepdim=True)).flatten().float()
    (estimate,) = torch.autograd.grad((workload.score(rollouts).logp.sum(1) * centered).sum() / members, weights)
    assert torch.cosine_similarity(exact.flatten(), estimate.flatten(), dim=0) > 0.9
    assert estimate.norm().item() == pytest.approx(exact.norm().item(), rel=0.25)


def test_gradient_climbs_the_exact_expectation():
    workload = built(values=(0.9,))
    rows = torch.arange(8)
    optimizer = torch.optim.AdamW(workload.policy.parameters(), lr=3e-3)
    rewards = reward_of_configurations(workload, workload.training, rows, ACCURACY_ALONE)
    for _ in range(60):
        reward = (
            (workload.controller.configuration_logp(workload.training, rows).exp() * rewards).flatten(1).sum(1).mean()
        )
        optimizer.zero_grad()
        (-reward).backward()
        optimizer.step()
    assert reward > 0.95


def last_rewards(config, folder):
    gw.train(replace(config, run=gw.RunConfig(run_dir=folder)))
    return [entry["reward"] for entry in read_jsonl(folder / "metrics.jsonl")]


def test_group_normalized_advantages_train_it_along_the_golden_curve(tmp_path):
    rewards = last_rewards(recipe(), tmp_path)
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3
    assert rewards == pytest.approx(json.loads(GOLDEN.read_text()), abs=0.02)
    (sample, *_) = read_jsonl(tmp_path / "samples.jsonl")
    assert set(sample) >= {"image", "question", "knobs", "answer", "right_answers", "budget_ms", "estimated_ms"}
    assert sample["estimated_upper_ms"] <= sample["budget_ms"]
    after = json.loads((tmp_path / "eval.json").read_text())["after"]
    assert after["estimated_over_budget_fraction"] == 0
    assert after["accuracy_greedy"] > 0.3


def test_a_resumed_run_is_the_same_bit_by_bit_though_nothing_is_remembered(tmp_path):
    for name, steps in (("straight", (4,)), ("stopped", (1, 4))):
        for last in steps:
            run = gw.RunConfig(run_dir=tmp_path / name, resume=True, preflight=False)
            gw.train(replace(recipe(), steps=last, run=run))
    straight, stopped = (
        (tmp_path / name / "checkpoints" / "step-000004" / "policy.safetensors").read_bytes()
        for name in ("straight", "stopped")
    )
    assert straight == stopped


def test_pairwise_ranking_trains_it_too(tmp_path):
    rewards = last_rewards(replace(recipe(), loss=gw.LossConfig(kind="ranking")), tmp_path)
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3


def test_answers_and_hidden_states_are_computed_once():
    workload, passes = built(values=(0.9,)), []
    seen = EXECUTOR.adapter.encode

    def counting(prompts, texts=None):
        passes.append(len(prompts))
        return seen(prompts, texts)

    EXECUTOR.adapter.encode = counting
    try:
        first = workload.rollout(rows_of(8, 4))
        fresh = len(passes)
        again = workload.rollout(rows_of(8, 4))
    finally:
        del EXECUTOR.adapter.encode
    assert fresh == 8  # one pass a question, and the answers go on from there
    assert len(passes) == fresh
    assert first.data["answer"] == again.data["answer"]


def test_two_ranks_with_members_apart_do_what_one_does_with_groups_whole(tmp_path):
    ended = on_ranks(2, [Path(__file__).with_name("ranks.py"), tmp_path / "two.pt"])
    assert ended.returncode == 0, ended.stderr[-3000:]
    one, two = outcome("whole"), torch.load(tmp_path / "two.pt")
    assert two["ranks"] == 2
    assert torch.equal(one["choices"], two["choices"])
    assert_close(one["gradient"], two["gradient"], rtol=0, atol=1e-7)
    # AdamW moves a weight whose gradient is rounding by up to the learning rate, so single weights may differ
    assert (one["weights"] - two["weights"]).norm() < 1e-5 * one["weights"].norm()
