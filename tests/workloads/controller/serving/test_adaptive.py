"""A trained controller in use: it chooses as in training, nothing runs that was not chosen, and bad budgets and other
models are refused."""

import json
import shutil
import time
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tiny.estimator import fixed_estimator
from tiny.llava import color_llava, save_llava
from tiny.vqa import file_name, write_vqa
from torch.testing import assert_close

import groupwise as gw
from groupwise.core.errors import UserError
from groupwise.latency.machine import current_machine
from groupwise.latency.meter import find_model_parts
from groupwise.rewards.config import RewardFunctionsConfig
from groupwise.workloads.controller.conditions import make_conditions
from groupwise.workloads.controller.config import BudgetConfig
from groupwise.workloads.controller.latency.estimates import KnobLatencyEstimator, ProportionalEstimator
from groupwise.workloads.controller.latency.source import fit_estimator
from groupwise.workloads.controller.model.executor import AnswerRequest
from groupwise.workloads.controller.model.load import load_model
from groupwise.workloads.controller.policy.decide import choices_to_knobs, greedy_option
from groupwise.workloads.controller.policy.network import ControllerNetwork
from groupwise.workloads.controller.serving.adaptive import make_question
from groupwise.workloads.controller.serving.server import ServedTimer
from groupwise.workloads.controller.task import Split
from groupwise.workloads.controller.tasks.mosaic.task import mosaic_questions
from groupwise.workloads.controller.tasks.vqa.config import VqaConfig

CPU = torch.device("cpu")
ROW = torch.tensor([0])
BUDGETS_MS = (4.2, 4.6, 5.0, 5.5, 6.0, 30.0)


def recipe(folder: Path) -> gw.Config:
    """Small steps: the last weights differ from the EMA weights, and little else happens."""
    task = VqaConfig(
        model=str(folder / "model"),
        images=folder / "data" / "images",
        questions=folder / "data" / "questions.json",
        annotations=folder / "data" / "annotations.json",
        dtype="float32",
        rewards=RewardFunctionsConfig(functions=("vqa",)),
        selection_share=0.3,
        estimator="proportional",
        max_new_tokens=3,
        prompt="{question} word9",
        budget=BudgetConfig(values=(0.6, 0.8, 1.2)),
    )
    return gw.Config(
        task,
        steps=3,
        conditions_per_step=4,
        rows_per_pass=32,
        reward=gw.RewardConfig(weights={"compute_cost": -20.0}),
        optimizer=gw.OptimizerConfig(learning_rate=1e-3, ema_decay=0.5),
        run=gw.RunConfig(run_dir=folder / "run", preflight=False),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("controlled")
    save_llava(made / "model")
    write_vqa(made / "data", 12)
    gw.train(recipe(made))
    return made


@dataclass(frozen=True)
class Milliseconds:
    """The proportional numbers, from an estimator that stands by them."""

    proportional: ProportionalEstimator

    def estimate(self, prompt_tokens, knobs):
        return self.proportional.estimate(prompt_tokens, knobs)


def stopped() -> float:
    """A clock on which nothing takes any time: neither images nor the pace change what is estimated."""
    return 0.0


@pytest.fixture(scope="module")
def trained(folder):
    return gw.AdaptiveModel.load(folder / "run")


@pytest.fixture(scope="module")
def adaptive(trained):
    settings = replace(trained.settings, estimator=Milliseconds(trained.settings.estimator))
    return gw.AdaptiveModel(trained.loaded, settings, trained.policy, clock=stopped)


@pytest.fixture(scope="module")
def lively(adaptive):
    """Choices that differ with every input: random weights, those of the stages six times as large."""
    policy = ControllerNetwork(adaptive.settings.width, adaptive.settings.options, seed=1)
    for name, weight in policy.state_dict().items():
        weight.mul_(6 if name.startswith("stage") else 4)
    return gw.AdaptiveModel(adaptive.loaded, adaptive.settings, policy, clock=stopped)


def already_cut(question):
    return replace(question, sample=replace(question.sample, crops_by_tier=dict(question.sample.crops_by_tier)))


def image(folder, number=100):
    return folder / "data" / "images" / file_name(number)


@pytest.mark.parametrize("enforcement", ["hard", "soft"])
def test_the_choice_is_the_policys_and_the_answer_the_models(folder, lively, enforcement):
    """As the workload decides, which reads every latency token of every tier."""
    workload = recipe(folder).workload.build(CPU)
    workload.policy.load_state_dict(lively.policy.state_dict())
    settings = with_budgets(lively.settings, enforcement, (0.0, 1.0))
    own = gw.AdaptiveModel(lively.loaded, settings, lively.policy, clock=stopped)
    question = already_cut(make_question(image(folder), "what is this", lively.loaded, prompt="{question} word9"))
    chosen = []
    for budget_ms in BUDGETS_MS:
        (reply,) = own.reply([question], [budget_ms])
        decided = workload.controller.decide(
            asked_alone(workload, question, budget_ms, enforcement), ROW, greedy_option
        )
        assert [reply.knobs] == choices_to_knobs(workload.options, decided.choices)
        assert reply.within_budget == (reply.estimated.upper_ms <= budget_ms) or enforcement == "soft"
        assert reply.within_budget or enforcement == "soft"
        fitted = workload.task.estimator.estimate(question.prompt_tokens, [reply.knobs])[0]
        assert reply.estimated == replace(fitted, stages_ms={"queue": 0, "image": 0, **fitted.stages_ms})
        (cold,), _ = workload.task.executor.answer([AnswerRequest(question.sample, reply.knobs)], max_new_tokens=3)
        assert reply.answer == workload.task.decode(cold.tokens)
        assert reply.measured.decode_steps == 2
        assert reply.measured.total_ms == pytest.approx(sum(reply.measured.stages_ms.values()))
        chosen.append(reply.knobs)
    assert len(set(chosen)) > (3 if enforcement == "hard" else 1)


@pytest.mark.parametrize(("enforcement", "clamped"), [("hard", (0.3, 0.5)), ("soft", (0.0, 0.5))])
def test_a_budget_beyond_the_trained_ones_becomes_the_nearest(folder, lively, enforcement, clamped):
    """A smaller soft budget stays as it is: nothing but the network would keep it."""
    workload = recipe(folder).workload.build(CPU)
    workload.policy.load_state_dict(lively.policy.state_dict())
    settings = with_budgets(lively.settings, enforcement, (0.3, 0.5))
    own = gw.AdaptiveModel(lively.loaded, settings, lively.policy, clock=stopped)
    question = already_cut(make_question(image(folder), "what is this", lively.loaded, prompt="{question} word9"))
    differs = 0
    for budget_ms in BUDGETS_MS:
        (reply,) = own.reply([question], [budget_ms])
        alone = asked_alone(workload, question, budget_ms, enforcement)
        nearest = replace(alone, relative_budget=alone.relative_budget.clamp(*clamped))
        decided = workload.controller.decide(nearest, ROW, greedy_option)
        assert [reply.knobs] == choices_to_knobs(workload.options, decided.choices)
        differs += not torch.equal(decided.choices, workload.controller.decide(alone, ROW, greedy_option).choices)
    assert differs


def with_budgets(settings, enforcement, shares):
    return replace(settings, budget=replace(settings.budget, enforcement=enforcement), trained_budget_range=shares)


def asked_alone(workload, question, budget_ms, enforcement):
    config = BudgetConfig(values=(budget_ms,), unit="ms", enforcement=enforcement)
    return make_conditions([question], Milliseconds(workload.task.estimator), workload.options, config)


def test_a_trained_controller_knows_its_budgets(folder, adaptive):
    training = recipe(folder).workload.build(CPU).training
    low, high = training.relative_budget.min().item(), training.relative_budget.max().item()
    assert adaptive.settings.trained_budget_range == (low, high)
    assert 0 < low < high == 1


def test_a_run_gives_its_newest_ema_weights(folder, adaptive):
    checkpoint = folder / "run" / "checkpoints" / "step-000003"
    averaged, last = (load_file(checkpoint / f"{name}.safetensors") for name in ("ema", "policy"))
    assert_close(dict(adaptive.policy.state_dict()), averaged, rtol=0, atol=0)
    assert not torch.equal(last["stage_one.join.weight"], averaged["stage_one.join.weight"])


def test_nothing_runs_that_was_not_chosen(folder, lively):
    parts = find_model_parts(lively.loaded.model)
    calls, crops = Counter(), []
    hooks = [
        block.register_forward_hook(lambda *_, index=index: calls.update([index]))
        for index, block in enumerate(parts.blocks)
    ]
    tower = lively.loaded.model.model.vision_tower.embeddings
    hooks.append(tower.register_forward_pre_hook(lambda _, given: crops.append(len(given[0]))))
    for budget_ms in BUDGETS_MS:
        calls.clear()
        crops.clear()
        reply = lively.generate(image(folder), "where is this", budget_ms)
        path = lively.settings.options.block_path(reply.knobs)
        assert [calls[index] for index in range(len(path))] == [3 * (k > 0) for k in path]  # the prompt, and two steps
        assert crops == [1 + lively.settings.options.crops_by_tier[reply.knobs.tier]]
    for hook in hooks:
        hook.remove()


def test_a_batch_equals_each_request_alone(folder, lively):
    """Pictures, questions and budgets in any mix; the same question under two budgets among them."""
    mix = [
        (image(folder, 100 + nth % 3), f"what is word{nth % 4}", BUDGETS_MS[nth % len(BUDGETS_MS)]) for nth in range(18)
    ]
    alone = [lively.generate(*each) for each in mix]
    together = lively.generate_batch(mix)
    assert [(each.knobs, each.answer) for each in together] == [(each.knobs, each.answer) for each in alone]
    for each in together:
        assert each.estimated.total_ms == pytest.approx(sum(single.estimated.total_ms for single in alone))
        assert each.within_budget == (each.estimated.upper_ms <= each.budget_ms)
    assert len({each.knobs.insertion_position for each in together}) > 1
    assert {each.batch_size for each in together} == {18}
    assert lively.generate_batch([]) == []


def test_saved_and_loaded_it_is_the_same(folder, trained, tmp_path):
    trained.save_pretrained(tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["config.json", "model.safetensors"]
    again = gw.AdaptiveModel.from_pretrained(tmp_path / "saved")
    assert again.settings == trained.settings
    one, two = (gw.AdaptiveModel(m.loaded, m.settings, m.policy, clock=stopped) for m in (trained, again))
    for budget_ms in BUDGETS_MS:
        first, second = (each.generate(image(folder), "what is this", budget_ms) for each in (one, two))
        assert (first.knobs, first.answer, first.estimated) == (second.knobs, second.answer, second.estimated)
    again.save_pretrained(tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes()


def test_a_fitted_estimator_goes_with_it_and_is_refused_elsewhere(folder, adaptive, tmp_path):
    loaded = adaptive.loaded
    fitted = fixed_estimator(loaded.model)
    for name, machine in (("here", fitted.machine), ("elsewhere", replace(current_machine(), cpu="another"))):
        estimator = KnobLatencyEstimator(replace(fitted, machine=machine), loaded.options, new_tokens=3)
        own = gw.AdaptiveModel(loaded, replace(adaptive.settings, estimator=estimator), adaptive.policy)
        own.save_pretrained(tmp_path / name)
    here = gw.AdaptiveModel.from_pretrained(tmp_path / "here", model=load_model(folder / "model"))
    lengths = make_question(image(folder), "what", loaded, prompt="{question} word9").prompt_tokens
    (expected,) = KnobLatencyEstimator(fitted, loaded.options, new_tokens=3).estimate(lengths, [loaded.options.full])
    full = here.estimate(image(folder), "what")
    assert full.total_ms == pytest.approx(expected.total_ms + full.stages_ms["image"])
    with pytest.raises(UserError, match=r"estimator.json was fitted for cpu another, not"):
        gw.AdaptiveModel.from_pretrained(tmp_path / "elsewhere")
    gw.AdaptiveModel.from_pretrained(tmp_path / "elsewhere", allow_estimator_mismatch=True)


def test_a_controller_whose_profile_does_not_hold_says_so_when_it_is_loaded(folder, adaptive, tmp_path):
    loaded = adaptive.loaded
    real = fit_estimator(
        loaded, timer_for=lambda executor: ServedTimer(executor, clock=time.thread_time), seconds=2, new_tokens=3
    )
    for name, factor in (("holds", 1), ("wrong", 20)):
        stages = real.coefficients.items()
        scaled = {stage: {n: factor * price for n, price in part.items()} for stage, part in stages}
        estimator = KnobLatencyEstimator(replace(real, coefficients=scaled), loaded.options, new_tokens=3)
        own = gw.AdaptiveModel(loaded, replace(adaptive.settings, estimator=estimator), adaptive.policy)
        own.save_pretrained(tmp_path / name)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        gw.AdaptiveModel.from_pretrained(tmp_path / "holds")
        gw.AdaptiveModel.from_pretrained(tmp_path / "wrong", estimator=estimator)
    with pytest.warns(UserWarning, match=r"wrong does not hold now: estimated .* call recalibrate\(\)"):
        gw.AdaptiveModel.from_pretrained(tmp_path / "wrong")


def test_recalibration_measures_the_current_speed(folder, trained, adaptive):
    """Its estimator comes from a machine that is hundreds of times slower."""
    loaded, fitted = adaptive.loaded, fixed_estimator(adaptive.loaded.model)
    slow = replace(
        fitted,
        coefficients={stage: {n: 300 * p for n, p in part.items()} for stage, part in fitted.coefficients.items()},
    )
    estimator = KnobLatencyEstimator(slow, loaded.options, new_tokens=3)
    own = gw.AdaptiveModel(loaded, replace(adaptive.settings, estimator=estimator), adaptive.policy)
    with pytest.raises(UserError, match="is below the cheapest configuration"):
        own.generate(image(folder), "what", 500)
    slowdown = own.recalibrate(60)
    assert 0 < slowdown < 0.2
    replies = [own.generate(image(folder), "what", 500) for _ in range(9)]
    measured_ms = sorted(reply.measured.total_ms for reply in replies)[4]
    assert measured_ms / 3 < replies[0].estimated.total_ms < 3 * measured_ms
    with pytest.raises(UserError, match="answers is 5: it must be at least 40"):
        own.recalibrate(5)
    with pytest.raises(UserError, match="come from ProportionalEstimator, which was not measured"):
        trained.recalibrate()


def test_a_controller_of_another_model_is_refused(folder, trained, tmp_path):
    trained.save_pretrained(tmp_path / "saved")
    other = color_llava()
    with torch.no_grad():
        other.lm_head.weight[3, 5] += 1e-3
    shutil.copytree(folder / "model", tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match=r"trained for another model than .*other'.* the same shape but other weights"):
        gw.AdaptiveModel.from_pretrained(tmp_path / "saved", model=tmp_path / "other")
    with pytest.raises(UserError, match=r"another model than 'mosaic': width 32, not 64, blocks 8, not 12"):
        gw.AdaptiveModel.load(folder / "run", model="mosaic")
    weights = folder / "model" / "model.safetensors"
    before = weights.read_bytes()
    try:
        shutil.copy(tmp_path / "other" / "model.safetensors", weights)
        resumed = replace(recipe(folder), steps=4)
        with pytest.raises(UserError, match=r"was made with another config.json: identity was \w+ and is now \w+"):
            gw.train(replace(resumed, run=replace(resumed.run, resume=True)))
    finally:
        weights.write_bytes(before)


def test_what_is_no_controller_is_refused(folder, trained, tmp_path):
    with pytest.raises(UserError, match=r"nowhere holds no checkpoint"):
        gw.AdaptiveModel.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds no config.json, so no controller"):
        gw.AdaptiveModel.from_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"is not of a controller"):
        gw.AdaptiveModel.from_pretrained(folder / "model")
    trained.save_pretrained(tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"model.safetensors holds no tensors"):
        gw.AdaptiveModel.from_pretrained(tmp_path / "cut", model=load_model(folder / "model"))
    config = json.loads((tmp_path / "cut" / "config.json").read_text())
    config["estimator"] = {"kind": "custom"}
    (tmp_path / "cut" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="estimator of your own, which is not saved"):
        gw.AdaptiveModel.from_pretrained(tmp_path / "cut", model=load_model(folder / "model"))
    config["network"] = 2
    (tmp_path / "cut" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"was saved by another version.*Train it again"):
        gw.AdaptiveModel.from_pretrained(tmp_path / "cut", model=load_model(folder / "model"))


@pytest.mark.parametrize(
    ("budget_ms", "message"),
    [
        (3.0, r"The budget 3 ms is below the cheapest configuration, which is estimated at .* with best_effort=True"),
        (0.02, r"It looks like seconds: 0.02 s are 20 ms"),
        (0, "budget_ms is 0: it must be a finite number above 0, in milliseconds"),
        (-4, "budget_ms is -4"),
    ],
)
def test_an_infeasible_budget_is_refused_or_served_as_a_best_effort(folder, adaptive, budget_ms, message):
    with pytest.raises(UserError, match=message):
        adaptive.generate_batch([(image(folder), "what", 30), (image(folder), "what", budget_ms)])
    good, poor = adaptive.generate_batch(
        [(image(folder), "what", 30), (image(folder), "what", budget_ms)], best_effort=True
    )
    assert (good.within_budget, poor.within_budget, poor.budget_ms) == (True, False, budget_ms)
    assert poor.knobs == adaptive.settings.options.cheapest


def test_what_is_no_budget_is_always_refused(folder, adaptive):
    for wrong in (float("nan"), float("inf"), "40", None, True):
        with pytest.raises(UserError, match="budget_ms is"):
            adaptive.generate(image(folder), "what", wrong, best_effort=True)
    with pytest.raises(UserError, match=r"must be a tuple \(image, question, budget_ms\)"):
        adaptive.generate_batch([(image(folder), "what")])
    with pytest.raises(UserError, match="The question is ' '"):
        adaptive.generate(image(folder), " ", 9)
    for wrong, message in (
        (None, "The image is None: give one image"),
        ([image(folder)], "The image is of type list: give one image.*generate_batch"),
        (np.full((48, 64, 3), 200.0), "from 200 to 200: floats must be from 0 to 1"),
        (np.zeros((3, 48, 64)), r"of shape \(3, 48, 64\): it must be height x width"),
        (b"no picture", "The image cannot be read as an image"),
    ):
        with pytest.raises(UserError, match=message):
            adaptive.generate(wrong, "what", 9)


def test_a_mosaic_is_given_as_pixels_image_or_file(tmp_path):
    loaded = load_model("mosaic")
    (drawn, *_) = mosaic_questions(Split.TEST, 1)
    shades = torch.randint(0, 256, (36, 48), dtype=torch.uint8)
    picture = Image.fromarray(shades.numpy())
    picture.save(tmp_path / "mosaic.png")
    given = [
        picture,
        picture.convert("RGB"),
        shades,
        shades.numpy(),
        shades / 255,
        (shades / 255).double(),
        tmp_path / "mosaic.png",
    ]
    names = {make_question(each, "digit b3", loaded).sample.name for each in given}
    assert len(names) == 1
    asked = make_question(picture, "digit b3", loaded)
    assert asked.prompt_tokens == {tier: 9 * len(crops) + 2 for tier, crops in asked.sample.crops_by_tier.items()}
    assert set(asked.prompt_tokens) == set(drawn.prompt_tokens)
    for wrong, message in (
        (torch.zeros(3, 36, 48), r"of shape \(3, 36, 48\): give height x width"),
        (torch.full((36, 48), float("nan")), "not finite numbers"),
        (torch.zeros(35, 48), "35 x 48 pixels cannot be cut"),
        (tmp_path / "none.png", "There is no image file"),
    ):
        with pytest.raises(UserError, match=message):
            make_question(wrong, "digit b3", loaded)
    with pytest.raises(UserError, match="The word 'What' is not in mosaic's vocabulary"):
        make_question(picture, "What is this", loaded)
