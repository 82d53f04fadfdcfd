"""The whole evaluation on a tiny model: eval.json holds what it promises."""

import io
import json
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from tiny.controller import EXECUTOR, SmallConfig, recipe
from tiny.estimator import fixed_estimator
from tiny.llava import OPTIONS

import groupwise as gw
from groupwise.cli.main import main
from groupwise.core.errors import UserError
from groupwise.workloads.controller.config import BudgetConfig, ControllerEvalConfig
from groupwise.workloads.controller.evaluate.baselines import controlled, oracle_labels, train_imitation
from groupwise.workloads.controller.evaluate.exact import build_evaluation_set
from groupwise.workloads.controller.evaluate.render import tables
from groupwise.workloads.controller.evaluate.report import recalibrate_if_drifted
from groupwise.workloads.controller.latency.estimates import KnobLatencyEstimator
from groupwise.workloads.controller.policy.decide import Controller

CPU = torch.device("cpu")
BUDGETS = (0.6, 0.7, 0.8, 0.9, 1.2)
METHODS = {"controller", "imitation", "lookup", "kind_oracle", "oracle", "random", "dearest", "cheapest"}


def built(**changes):
    return SmallConfig(budget=BudgetConfig(values=BUDGETS), **changes).build(CPU)


@pytest.fixture(scope="module")
def workload():
    return built()


def test_imitation_learns_its_labels(workload):
    training = build_evaluation_set(workload, workload.task.questions)
    before = [weight.clone() for weight in workload.policy.parameters()]
    learner = train_imitation(workload, training, steps=60)
    assert all(torch.equal(old, new) for old, new in zip(before, workload.policy.parameters(), strict=True))
    assert isinstance(learner, Controller)
    best = oracle_labels(training)
    right = training.score(best) > 0
    agreed = (controlled(learner, training) == best)[right].double().mean()
    untrained = (controlled(workload.controller, training) == best)[right].double().mean()
    assert agreed > untrained + 0.3


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    small = replace(recipe().workload, budget=BudgetConfig(values=BUDGETS), eval=SETTINGS)
    gw.train(
        replace(
            recipe(), workload=small, steps=12, recipe=f"{__name__}:tiny", run=gw.RunConfig(run_dir=folder, threads=1)
        )
    )
    return folder


SETTINGS = ControllerEvalConfig(timed_answers=6, timed_answers_of_others=3, runs_of_singles=1, imitation_steps=10)


def tiny() -> gw.Config:
    return recipe()


@pytest.fixture(scope="module")
def evaluated(run_folder):
    """What `groupwise eval` says, and what it leaves in eval.json."""
    said = io.StringIO()
    with redirect_stdout(said):
        assert main(["eval", str(run_folder)]) == 0
    return said.getvalue(), json.loads((run_folder / "eval.json").read_text())


def test_eval_of_a_run_writes_all_that_was_promised(run_folder, evaluated):
    said, found = evaluated
    assert "kind oracle" in said
    assert "Picture:" in said
    assert (run_folder / "eval.png").read_bytes().startswith(b"\x89PNG")
    assert {"before", "after", "gap_closed", "gap_closed_per_sample"} <= set(found)
    assert [entry["budget_ms"] for entry in found["budgets"]] == pytest.approx([1.1 * 161 * part for part in BUDGETS])
    for entry in found["budgets"]:
        assert set(entry) >= METHODS
        for name in METHODS:
            metrics = entry[name]
            assert 0 <= metrics["accuracy"] <= entry["oracle"]["accuracy"] <= 1
            assert 0 < metrics["p50_ms"] <= metrics["p95_ms"]
            low, high = metrics["violation_interval"]
            assert low <= metrics["violation_rate"] <= high
            assert sum(metrics["knobs"]["blocks"].values()) == pytest.approx(1)
    means = found["mean_accuracy"]
    assert means["controller"] == pytest.approx(
        sum(entry["controller"]["accuracy"] for entry in found["budgets"]) / len(BUDGETS)
    )
    way = means["oracle"] - means["lookup"]
    assert found["gap_closed_per_sample"] == pytest.approx((means["controller"] - means["lookup"]) / way)
    assert (found["test_questions"], found["choose_questions"]) == (12, 12)
    assert found["timed_questions_per_budget"] == {
        name: 6 if name in ("controller", "lookup") else 3 for name in METHODS
    }
    assert found["violations"]["controller"]["answers"] == 6 * len(BUDGETS)


def test_times_are_measured_with_the_controllers_own_apart(evaluated):
    _, found = evaluated
    own = found["controller_time"]
    assert own["stage_one_p50_ms"] > 0
    assert 0 < own["share_of_answer"] < 1
    controlled_ones = found["estimate"]["controlled"]
    stages = {name: entry["measured_p50_ms"] for name, entry in controlled_ones["stages"].items()}
    assert stages["controller"] == pytest.approx(own["p50_ms"])
    assert stages["decode"] == 0
    assert stages["vision"] + stages["prefill"] == pytest.approx(controlled_ones["measured_p50_ms"], rel=0.5)
    assert stages["controller"] < stages["prefill"]  # it is told as a part of it
    # every distinct computation stands by itself once
    singles = found["singles"]
    assert len(singles) == len({(each.tier, OPTIONS.block_path(each)) for each in OPTIONS.configurations()})


def test_a_machine_that_has_changed_since_its_profile_is_named(evaluated):
    found = deepcopy(evaluated[1])
    assert found["pace_since_profile"] is None, "the tiny model's estimator counts work, and knows no machine"
    assert tables(found)[-1].note == ""
    found |= {"pace_since_profile": 1.2}
    found["estimate"]["controlled"]["median_error"] = 0.25
    assert tables(found)[-1].note == "", "it is what the short look saw"
    found["estimate"]["controlled"]["median_error"] = 0.5
    assert "answers took 1.25 times as long as just before" in tables(found)[-1].note
    found |= {"recalibrated": True}
    assert "Answers took 1.20 times as long as when this machine was profiled" in tables(found)[-1].note
    assert "answers took 1.50 times as long as just before" in tables(found)[-1].note


def test_it_judges_at_the_pace_that_the_machine_has_now():
    """Profiled, as it says, on a machine that is hundreds of times faster: hardly an answer keeps to it. One that is
    slower keeps all that was promised."""
    fitted = fixed_estimator(EXECUTOR.adapter.model)
    fast, slow = (
        replace(
            fitted,
            coefficients={
                stage: {n: factor * p for n, p in part.items()} for stage, part in fitted.coefficients.items()
            },
        )
        for factor in (1 / 300, 300)
    )
    plain = built(eval=replace(SETTINGS, recalibration_answers=60))
    plain.task = replace(plain.task, estimator=KnobLatencyEstimator(fast, OPTIONS))
    judged, pace = recalibrate_if_drifted(plain)
    assert pace > 3
    asked = plain.task.questions[0].prompt_tokens, [OPTIONS.full]
    (before,), (after,) = plain.task.estimator.estimate(*asked), judged.task.estimator.estimate(*asked)
    assert after.total_ms > 3 * before.total_ms
    assert judged.policy is plain.policy
    plain.task = replace(plain.task, estimator=KnobLatencyEstimator(slow, OPTIONS))
    same, again = recalibrate_if_drifted(plain)
    assert same is plain
    assert 0 < again < 0.2
    assert recalibrate_if_drifted(built())[1] is None
    plain.config = replace(plain.config, eval=replace(SETTINGS, recalibration_answers=0))
    assert recalibrate_if_drifted(plain) == (plain, None)
    with pytest.raises(UserError, match="recalibration_answers is 7: it must be 0, or at least 40"):
        replace(SETTINGS, recalibration_answers=7)


def test_a_task_without_test_questions_has_no_report(workload):
    plain = built()
    plain.task = replace(plain.task, test=None)
    assert plain.reporter.final_report() is None
