"""The whole evaluation on a tiny model: eval.json holds what it promises."""

import io
import json
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from matplotlib.figure import Figure
from tiny.controller import EXECUTOR, SmallConfig, recipe
from tiny.estimator import fixed_estimator
from tiny.llava import OPTIONS

import groupwise as gw
from groupwise.cli.main import main
from groupwise.core.errors import UserError
from groupwise.workloads.controller.config import BudgetConfig, ControllerEvalConfig
from groupwise.workloads.controller.evaluate.baselines import (
    controller_choices,
    right_configurations,
    train_imitation,
)
from groupwise.workloads.controller.evaluate.exact import build_evaluation_set
from groupwise.workloads.controller.evaluate.render import METHOD_NAMES, _draw_accuracy, tables
from groupwise.workloads.controller.evaluate.report import recalibrate_if_drifted
from groupwise.workloads.controller.latency.estimates import KnobLatencyEstimator
from groupwise.workloads.controller.policy.decide import Controller

CPU = torch.device("cpu")
BUDGETS = (0.6, 0.7, 0.8, 0.9, 1.2)
METHODS = {
    "controller",
    "imitation",
    "lookup",
    "table_by_first_word",
    "words_classifier",
    "words",
    "one_stage",
    "ceiling",
    "question_type_oracle",
    "per_question_oracle",
    "random_feasible",
    "slowest_feasible",
    "cheapest",
}


def built(**changes):
    return SmallConfig(budget=BudgetConfig(values=BUDGETS), **changes).build(CPU)


@pytest.fixture(scope="module")
def workload():
    return built()


def test_imitation_learns_to_choose_any_right_configuration(workload):
    training = build_evaluation_set(workload, workload.task.questions)
    before = [weight.clone() for weight in workload.policy.parameters()]
    learner = train_imitation(workload, training, steps=60)
    assert all(torch.equal(old, new) for old, new in zip(before, workload.policy.parameters(), strict=True))
    assert isinstance(learner, Controller)
    solvable = right_configurations(training, len(training.candidates)).any(1).view(training.budget_ms.shape)
    learned, untrained = (
        training.accuracy_of(controller_choices(each, training))[solvable].mean()
        for each in (learner, workload.controller)
    )
    assert learned > 0.9
    assert learned > untrained + 0.2


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


SETTINGS = ControllerEvalConfig(
    timed_answers=6,
    timed_answers_other_methods=3,
    imitation_steps=10,
    predictor_steps=20,
    prefilled_questions=8,
)


def tiny() -> gw.Config:
    return recipe()


@pytest.fixture(scope="module")
def evaluated(run_folder):
    """What `groupwise eval` says, and what it leaves in eval.json."""
    said = io.StringIO()
    with redirect_stdout(said):
        assert main(["eval", str(run_folder), "--recipe", f"{__name__}:tiny"]) == 0
    return said.getvalue(), json.loads((run_folder / "eval.json").read_text())


def test_eval_of_a_run_writes_all_promised_metrics(run_folder, evaluated):
    said, metrics = evaluated
    assert "question-type oracle" in said
    assert "Picture:" in said
    assert (run_folder / "eval.png").read_bytes().startswith(b"\x89PNG")
    assert {"before", "after", "mean_accuracy", "violations"} <= set(metrics)
    assert [entry["budget_ms"] for entry in metrics["budgets"]] == pytest.approx([1.1 * 161 * part for part in BUDGETS])
    for entry in metrics["budgets"]:
        assert set(entry) >= METHODS
        for name in METHODS:
            method = entry[name]
            assert 0 <= method["accuracy"] <= entry["per_question_oracle"]["accuracy"] <= 1
            assert 0 < method["p50_ms"] <= method["p95_ms"]
            low, high = method["violation_interval"]
            assert low <= method["violation_rate"] <= high
            assert sum(method["knobs"]["blocks"].values()) == pytest.approx(1)
    means = metrics["mean_accuracy"]
    assert means["controller"] == pytest.approx(
        sum(entry["controller"]["accuracy"] for entry in metrics["budgets"]) / len(BUDGETS)
    )
    assert (metrics["test_questions"], metrics["selection_questions"]) == (12, 12)
    main = {"controller", "lookup", "words", "ceiling"}
    assert metrics["timed_questions_per_budget"] == {name: 6 if name in main else 3 for name in METHODS}
    assert metrics["violations"]["controller"]["answers"] == 6 * len(BUDGETS)


def test_the_controllers_time_is_measured_apart(evaluated):
    _, metrics = evaluated
    overhead = metrics["controller_overhead"]
    assert overhead["stage_one_p50_ms"] > 0
    assert 0 < overhead["share_of_answer"] < 1
    served = metrics["estimate"]["controller"]
    stages = {name: entry["measured_p50_ms"] for name, entry in served["stages"].items()}
    assert stages["controller"] == pytest.approx(overhead["p50_ms"])
    assert stages["decode"] == 0
    assert stages["vision"] + stages["prefill"] == pytest.approx(served["measured_p50_ms"], rel=0.5)
    assert stages["controller"] < stages["prefill"]  # which includes it
    # each distinct computation is listed once, with its latency if some method chose it
    fixed = metrics["fixed_configurations"]
    assert len(fixed) == len({(each.tier, OPTIONS.block_path(each)) for each in OPTIONS.configurations()})
    assert all(("p50_ms" in entry) == (entry["answers"] > 0) for entry in fixed)


def test_a_machine_that_has_changed_since_its_profile_is_named(evaluated):
    metrics = deepcopy(evaluated[1])
    assert metrics["slowdown_since_profile"] is None, "the tiny model's estimator counts work, and knows no machine"
    assert tables(metrics)[-1].note == ""
    metrics |= {"slowdown_since_profile": 1.2}
    metrics["estimate"]["controller"]["median_error"] = 0.25
    assert tables(metrics)[-1].note == "", "the quick check measured the same slowdown"
    metrics["estimate"]["controller"]["median_error"] = 0.5
    assert "answers took 1.25 times as long as just before" in tables(metrics)[-1].note
    metrics |= {"recalibrated": True}
    assert "Answers took 1.20 times as long as when this machine was profiled" in tables(metrics)[-1].note
    assert "answers took 1.50 times as long as just before" in tables(metrics)[-1].note


def test_the_estimator_is_recalibrated_to_the_current_speed_of_the_machine():
    """Profiled, as it says, on a machine that is hundreds of times faster: hardly an answer stays within its estimate.
    With one that is slower all answers do, and budgets mean as little."""
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
    recalibrated, slowdown = recalibrate_if_drifted(plain)
    assert slowdown > 3
    asked = plain.task.questions[0].prompt_tokens, [OPTIONS.full]
    (before,), (after,) = plain.task.estimator.estimate(*asked), recalibrated.task.estimator.estimate(*asked)
    assert after.total_ms > 3 * before.total_ms
    assert recalibrated.policy is plain.policy
    plain.task = replace(plain.task, estimator=KnobLatencyEstimator(slow, OPTIONS))
    recalibrated, slowdown = recalibrate_if_drifted(plain)
    assert 0 < slowdown < 0.2
    (before,), (after,) = plain.task.estimator.estimate(*asked), recalibrated.task.estimator.estimate(*asked)
    assert after.total_ms < 0.3 * before.total_ms
    plain.task = replace(plain.task, estimator=recalibrated.task.estimator)
    assert 0.5 < recalibrate_if_drifted(plain)[1] < 2
    assert recalibrate_if_drifted(built())[1] is None
    plain.config = replace(plain.config, eval=replace(SETTINGS, recalibration_answers=0))
    assert recalibrate_if_drifted(plain) == (plain, None)
    with pytest.raises(UserError, match="recalibration_answers is 7: it must be 0, or at least 40"):
        replace(SETTINGS, recalibration_answers=7)


def test_gains_are_the_differences_of_mean_accuracies(evaluated):
    _, metrics = evaluated
    means, words = metrics["mean_accuracy"], metrics["words_method"]
    assert means["words"] == means[words] == max(means["table_by_first_word"], means["words_classifier"])
    for name in ("lookup", "words"):
        gain = metrics[f"gain_over_{name}"]
        assert gain["mean"] == pytest.approx(means["controller"] - means[name])
        assert sum(gain["by_budget"]) / len(BUDGETS) == pytest.approx(gain["mean"])
        low, high = gain["interval"]
        assert low <= gain["mean"] <= high
    assert metrics["gains"].keys() == METHODS - {"controller"}
    for latency in ("p50", "p95", "mean"):
        rows = metrics[f"at_equal_{latency}"]
        assert rows.keys() == {"controller", "lookup", "words", "one_stage", "ceiling"}
        own = rows["controller"]["accuracy"]
        for name in rows.keys() - {"controller"}:
            mean = sum(mine - other for mine, other in zip(own, rows[name]["accuracy"], strict=True)) / len(BUDGETS)
            assert rows[name]["mean"] == pytest.approx(mean)


def test_a_budget_that_everything_fits_leaves_the_controller_free(evaluated):
    _, metrics = evaluated
    assert metrics["uncontrolled"]["controller"] == {"1.2": metrics["budgets"][-1]["controller"]["accuracy"]}
    assert 0 <= metrics["uncontrolled"]["accuracy"] <= 1


def test_every_input_of_the_controller_is_replaced_in_turn(evaluated):
    _, metrics = evaluated
    replaced = {f"{name}_{by}" for name in ("question", "overview", "latency_token") for by in ("swapped", "zeros")}
    assert metrics["ablation"].keys() == {"controller"} | replaced
    assert metrics["ablation"]["controller"] == metrics["mean_accuracy"]["controller"]


def test_the_chart_puts_every_method_at_the_median_of_its_timed_answers(evaluated):
    """Budgets bound the 95 % quantile: a method drawn at its budget would look slower than its median answer. A fixed
    configuration is drawn if it was timed often enough."""
    figure = Figure()
    axes = figure.subplots()
    _draw_accuracy(axes, evaluated[1])
    drawn = {container.get_label(): container.lines for container in axes.containers}
    for name in ("controller", "lookup", "words", "ceiling"):
        line, _, (whiskers,) = drawn[METHOD_NAMES[name]]
        entries = [entry[name] for entry in evaluated[1]["budgets"]]
        assert list(line.get_xdata()) == [entry["p50_ms"] for entry in entries]
        assert [segment[1][0] for segment in whiskers.get_segments()] == pytest.approx(
            [entry["p95_ms"] for entry in entries]
        )
    dots = [collection for collection in axes.collections if str(collection.get_label()).startswith("fixed")]
    xs = sorted(x for collection in dots for x, _ in collection.get_offsets().tolist())
    often = [entry["p50_ms"] for entry in evaluated[1]["fixed_configurations"] if entry["answers"] >= 5]
    assert 0 < len(often) < len(evaluated[1]["fixed_configurations"])
    assert xs == pytest.approx(sorted(often))


def test_the_report_says_what_each_method_is_charged(evaluated):
    said, metrics = evaluated
    assert "The controller's lead in points" in said
    assert f"controller {metrics['own_ms']['controller']:.2f} ms" in tables(metrics)[0].note
    assert metrics["own_ms"]["lookup"] == 0
    assert metrics["own_ms"]["ceiling"] == metrics["own_ms"]["controller"]
    assert metrics["controller_overhead"]["overhead_p50_ms"] <= metrics["own_ms"]["controller"]
    assert 0 < metrics["own_ms"]["one_stage"] < metrics["own_ms"]["controller"]


def test_a_task_without_test_questions_has_no_report(workload):
    plain = built()
    plain.task = replace(plain.task, test_questions=None)
    assert plain.reporter.final_report() is None


def test_what_needs_training_can_be_left_out():
    settings = ControllerEvalConfig(
        timed_answers=1, timed_answers_other_methods=1, imitation_steps=0, predictor_steps=0, recalibration_answers=0
    )
    report = SmallConfig(budget=BudgetConfig(values=(0.8,)), eval=settings).build(CPU).reporter.final_report()
    trained = {"imitation", "words_classifier", "one_stage", "ceiling"}
    assert report.metrics["mean_accuracy"].keys() == METHODS - trained
    assert report.metrics["words_method"] == "table_by_first_word"
    assert report.metrics["at_equal_p50"].keys() == {"controller", "lookup", "words"}
