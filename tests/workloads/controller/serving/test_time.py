"""Time that is true: it starts when a request arrives, follows the machine, and knows batches and other calls."""

import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from PIL import Image
from tiny.busy import HAS_AFFINITY, on_one_core
from tiny.estimator import fixed_estimator
from tiny.llava import save_llava

import groupwise as gw
from groupwise.latency.pace import Pace
from groupwise.workloads.controller.config import BudgetConfig
from groupwise.workloads.controller.latency.estimates import KnobLatencyEstimator, ProportionalEstimator
from groupwise.workloads.controller.latency.source import fit_estimator
from groupwise.workloads.controller.model.load import load_model
from groupwise.workloads.controller.policy.network import ControllerNetwork
from groupwise.workloads.controller.serving.adaptive import make_question
from groupwise.workloads.controller.serving.files import ControllerSettings
from groupwise.workloads.controller.serving.server import ServedTimer
from groupwise.workloads.controller.task import ModelSource


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    save_llava(folder)
    return load_model(folder)


def controlled(loaded, estimator, **budget):
    """With an untrained controller: its choices are as good as any for the time they take."""
    width = loaded.adapter.text_config.hidden_size
    source = ModelSource(loaded.name, loaded.fingerprint)
    settings = ControllerSettings(source, width, loaded.options, BudgetConfig(**budget), 1, None, estimator)
    return gw.AdaptiveModel(loaded, settings, ControllerNetwork(width, loaded.options, seed=3))


def fixed(loaded, factor=1.0):
    """1 ms a crop, half a millisecond a block; as much slower as asked for."""
    known = fixed_estimator(loaded.model)
    slower = {
        stage: {name: factor * value for name, value in part.items()} for stage, part in known.coefficients.items()
    }
    return KnobLatencyEstimator(replace(known, coefficients=slower), loaded.options)


def picture(width=64, height=48, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_the_clock_starts_at_arrival_and_the_image_counts(loaded, tmp_path):
    """A large file takes most of a budget that would do for the model alone: the cheapest knobs, told as too late."""
    picture(2400, 1800).save(tmp_path / "large.png")
    model = controlled(loaded, fixed(loaded))
    started = time.perf_counter()
    roomy = model.generate(tmp_path / "large.png", "what is this", 10_000)
    elapsed_ms = 1000 * (time.perf_counter() - started)
    measured = roomy.measured
    assert sum(measured.stages_ms.values()) == pytest.approx(measured.total_ms)
    assert 0.8 * elapsed_ms - 5 < measured.total_ms <= elapsed_ms
    assert measured.stages_ms["image"] > 20
    assert roomy.estimated.stages_ms["image"] == pytest.approx(measured.stages_ms["image"], rel=0.2)
    assert roomy.within_budget
    late = model.generate(tmp_path / "large.png", "what is this", 20)
    assert (late.within_budget, late.knobs) == (False, loaded.options.cheapest)
    assert late.estimated.upper_ms > 20
    assert model.generate(picture(), "what is this", 10_000).measured.stages_ms["image"] < 20


def test_only_the_chosen_tier_is_cut(loaded):
    question = make_question(picture(), "what is this", loaded)
    cut, crops = [], question.sample.crops_by_tier
    own = crops._cut
    crops._cut = lambda tier: cut.append(tier) or own(tier)
    (reply,) = controlled(loaded, fixed(loaded)).reply([question], [1000])
    assert set(cut) == {reply.knobs.tier}


@pytest.mark.parametrize("factor", [0.02, 30.0])
def test_a_wrong_estimator_is_corrected_both_ways(loaded, factor):
    """Its milliseconds are far too few or too many: after some answers they are this machine's."""
    model, asked = controlled(loaded, fixed(loaded, factor)), make_question(picture(), "what is this", loaded)
    replies = [model.reply([asked], [100_000])[0] for _ in range(90)]
    assert replies[0].pace == Pace()
    assert model.pace.answers == 90
    assert (model.pace.slowdown > 2) if factor < 1 else (model.pace.slowdown < 0.5)
    last = replies[-30:]
    medians = [np.median([getattr(reply, kind).total_ms for reply in last]) for kind in ("estimated", "measured")]
    assert medians[0] == pytest.approx(medians[1], rel=0.35)


def test_a_batch_that_will_be_late_says_so(loaded):
    """40 requests, each with a budget that is enough for it alone. What batches share is learned on the way."""
    model = controlled(loaded, KnobLatencyEstimator(_fit(loaded, seconds=6), loaded.options))
    asked = [make_question(picture(seed=seed), f"what is word{seed % 9}", loaded) for seed in range(40)]
    fastest_ms = min(model.reply([question], [1e5])[0].measured.total_ms for question in asked)
    budgets_ms = [fastest_ms * (3 + row / 40) for row in range(39)] + [1e5]
    batches = [model.reply(asked, budgets_ms) for _ in range(12)]
    for replies in batches:
        assert len({reply.measured.total_ms for reply in replies}) == 1
        assert replies[0].measured.total_ms > max(budgets_ms[:-1])
        assert [reply.within_budget for reply in replies] == [False] * 39 + [True]
    alone = [model.reply([question], [budget_ms])[0] for question, budget_ms in zip(asked, budgets_ms, strict=True)]
    assert sum(bool(reply.within_budget) for reply in alone) > 10
    first, *_, last = (replies[0].estimated.total_ms / replies[0].measured.total_ms for replies in batches)
    assert first > 1.5
    assert 0.4 < last < 0.8 * first


def test_calls_from_threads_wait_for_each_other_and_say_so(loaded):
    model, asked = controlled(loaded, fixed(loaded)), make_question(picture(), "what is this", loaded)
    model.reply([asked], [100_000])
    with ThreadPoolExecutor(8) as pool:
        replies = [reply for (reply,) in pool.map(lambda _: model.reply([asked], [100_000]), range(24))]
    waits = [reply.measured.stages_ms["queue"] for reply in replies]
    assert max(waits) > 2 * np.median(
        [reply.measured.total_ms - wait for reply, wait in zip(replies, waits, strict=True)]
    )
    for reply, wait in zip(replies, waits, strict=True):
        assert reply.estimated.stages_ms["queue"] == wait <= reply.estimated.total_ms
    assert {reply.answer for reply in replies} == {replies[0].answer}


def test_proportions_are_no_milliseconds(loaded):
    """Whether the budget is kept stays unknown, and no budget in milliseconds is called too small."""
    model = controlled(loaded, ProportionalEstimator(loaded.options))
    for budget_ms in (1e-3, 5.0, 1e6):
        assert model.generate(picture(), "what is this", budget_ms).within_budget is None


def _fit(loaded, seconds):
    return fit_estimator(loaded, timer_for=ServedTimer, seconds=seconds, question_tokens=4)


@contextmanager
def busy_process():
    """Of lower priority: it takes a third of the core, so that everything else takes 1.5 times as long."""
    process = subprocess.Popen([sys.executable, "-c", "import os\nos.nice(3)\nwhile True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(not HAS_AFFINITY, reason="needs a process on a core of its own")
@pytest.mark.timeout(240)
@pytest.mark.slow
def test_the_promise_holds_while_another_process_comes_and_goes(loaded):
    """On the same answers a bound at the pace of the beginning is wrong: it breaks while the machine is slower."""
    rng = random.Random(0)
    questions = [make_question(picture(seed=seed), f"what is word{seed}", loaded) for seed in range(8)]
    with on_one_core():
        estimator = KnobLatencyEstimator(_fit(loaded, seconds=8), loaded.options)
        model = controlled(loaded, estimator)
        full_ms = model.estimate(picture(), "what is this").upper_ms

        def answer(static):
            """Whether it took no longer than its bound, than its bound at a static pace, and than its budget."""
            question = rng.choice(questions)
            (reply,) = model.reply([question], [full_ms * rng.uniform(0.9, 2.5)])
            fitted = estimator.estimate(question.prompt_tokens, [reply.knobs])[0]
            bounds = [reply.estimated.upper_ms, static.upper_ratio * fitted.upper_ms]
            limits = [*bounds, reply.budget_ms if reply.within_budget else inf]
            return [reply.measured.total_ms <= limit for limit in limits]

        quiet = np.array([answer(Pace()) for _ in range(300)])
        static = model.pace
        with busy_process():
            busy = np.array([answer(static) for _ in range(300)])
        after = np.array([answer(static) for _ in range(300)])
    assert abs(np.concatenate([quiet, busy, after])[:, 0].mean() - 0.95) < 0.02
    assert np.concatenate([quiet, busy, after])[:, 2].mean() > 0.93
    paced, fixed_pace = (sum(abs(part[:, column].mean() - 0.95) for part in (busy, after)) for column in (0, 1))
    assert paced < fixed_pace
