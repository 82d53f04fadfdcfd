"""The cached estimator of this machine: fitted once, by one process, for all, and again when it no longer holds."""

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from processes import ENVIRONMENT, on_ranks
from tiny.busy import busy_machine
from tiny.llava import save_llava

from groupwise.latency.drift import SpeedCheck
from groupwise.latency.estimator import LatencyEstimator
from groupwise.latency.records import PREFILL, MeasuredLatency
from groupwise.latency.regression import Observation
from groupwise.workloads.controller.latency import source
from groupwise.workloads.controller.latency.estimates import KnobLatencyEstimator
from groupwise.workloads.controller.latency.source import (
    cached_estimator,
    current_speed,
    fit_estimator,
    load_estimator,
)
from groupwise.workloads.controller.model.load import load_model
from groupwise.workloads.controller.serving.server import ServedTimer

TESTS = Path(__file__).parents[3]
PROCESS = """
import sys, time
from pathlib import Path
from workloads.controller.latency.test_source import estimator, holds
from groupwise.workloads.controller.latency.source import cached_estimator

def fit():
    with open(Path(sys.argv[1]) / "made", "a") as file:
        file.write("once ")
    time.sleep(0.5)
    return estimator()

print(cached_estimator("tiny", fit, holds, model="tiny", folder=Path(sys.argv[1])).coefficients)
"""


def observations():
    """10 ms, and 2 ms a block."""
    return [
        Observation(f"{n % 10} blocks", f"{n % 7}", {PREFILL: {"blocks": n % 10}}, MeasuredLatency({PREFILL: ms}, ms))
        for n in range(70)
        if (ms := 10.0 + 2.0 * (n % 10))
    ]


def estimator() -> LatencyEstimator:
    return LatencyEstimator.fit(observations(), model="tiny")


def holds(stored):
    """The check of a machine that has not changed."""
    return SpeedCheck.of(stored, observations())


def cached(key, fit, folder):
    return cached_estimator(key, fit, holds, model="tiny", folder=folder)


def test_it_is_fitted_once_and_then_loaded(tmp_path):
    fits = []

    def fit():
        fits.append(1)
        return estimator()

    first, again = cached("tiny", fit, tmp_path), cached("tiny", fit, tmp_path)
    assert fits == [1]
    assert first.coefficients == again.coefficients
    assert np.array_equal(first.ratios, again.ratios)
    cached("tiny", fit, tmp_path / "elsewhere")
    cached("tiny, longer answers", fit, tmp_path)
    assert fits == [1, 1, 1]


def test_processes_that_start_together_share_what_one_of_them_fits(tmp_path):
    command = [sys.executable, "-c", PROCESS, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TESTS) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert outputs[0] == outputs[1] != ""
    assert (tmp_path / "made").read_text() == "once "


def of_cpu_time(executor):
    """The timer of a machine on which nothing else runs, whatever does."""
    return ServedTimer(executor, clock=time.thread_time)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    save_llava(folder)
    return load_model(folder)


@pytest.fixture(scope="module")
def profiled(loaded):
    """A real profile of this machine."""
    return fit_estimator(loaded, timer_for=of_cpu_time, seconds=2)


def scaled(profile, factor):
    """The same, of a machine that takes so many times as long."""
    stages = profile.coefficients.items()
    return replace(profile, coefficients={stage: {n: factor * p for n, p in part.items()} for stage, part in stages})


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The user's cache, and profiles of two seconds."""
    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(source, "AUTO_SECONDS", 2.0)
    return tmp_path / "estimators"


def load_auto(loaded, timer_for=of_cpu_time):
    warnings = []
    known = load_estimator("auto", loaded, new_tokens=1, timer_for=timer_for, warn=warnings.append)
    return known.estimator, warnings


def store(loaded, cache, profile):
    """In place of the profile of this machine."""
    if not cache.exists():
        load_auto(loaded)
    (file,) = cache.glob("*.json")
    profile.save(file)
    return file


@pytest.mark.parametrize("factor", [20, 1 / 5])
def test_a_stored_profile_that_is_wrong_is_measured_again_and_says_why(loaded, profiled, cache, capsys, factor):
    file = store(loaded, cache, scaled(profiled, factor))
    capsys.readouterr()
    found, warnings = load_auto(loaded)
    printed = " ".join(capsys.readouterr().err.split())
    assert "Profiling again: the stored latency profile does not hold now: estimated" in printed
    slowdown = float(re.search(r"measured now [\d.]+ ms, ([\d.]+) times as long", printed)[1])
    assert slowdown == pytest.approx(1 / factor, rel=0.6)
    assert warnings == []
    assert LatencyEstimator.load(file, model=found.model).coefficients == found.coefficients
    known = KnobLatencyEstimator(found, loaded.options)
    assert not current_speed(known, loaded, timer_for=of_cpu_time).has_drifted


def test_a_stored_profile_that_holds_is_used_as_it_is(loaded, profiled, cache, capsys):
    file = store(loaded, cache, profiled)
    before = file.read_bytes()
    capsys.readouterr()
    started = time.perf_counter()
    found, warnings = load_auto(loaded)
    seconds = time.perf_counter() - started
    assert found.coefficients == profiled.coefficients
    assert (file.read_bytes(), warnings) == (before, [])
    assert "Profiling again" not in capsys.readouterr().err
    assert seconds < source.CHECK_SECONDS + 2


def test_a_profile_of_a_busy_machine_is_marked_and_measured_again(loaded, cache, capsys):
    with busy_machine():
        found, (warning,) = load_auto(loaded, ServedTimer)
    assert found.was_busy
    assert found.cpu_share < 0.7
    assert "was measured while other programs ran: its answers had the CPU for" in warning
    (file,) = cache.glob("*.json")
    assert json.loads(file.read_text())["cpu_share"] == found.cpu_share
    capsys.readouterr()
    quiet, warnings = load_auto(loaded)
    assert "Profiling again: the stored latency profile was measured while other" in " ".join(
        capsys.readouterr().err.split()
    )
    assert (quiet.was_busy, warnings) == (False, [])
    assert quiet.coefficients != found.coefficients


def test_a_good_profile_is_not_replaced_while_the_machine_is_busy(loaded, profiled, cache):
    file = store(loaded, cache, profiled)
    before = file.read_bytes()
    with busy_machine():
        found, (warning,) = load_auto(loaded, ServedTimer)
    assert (file.read_bytes(), found.coefficients) == (before, profiled.coefficients)
    assert "Other programs slow this machine down: estimated" in warning


def test_a_named_file_is_used_as_it_is_with_a_warning(loaded, profiled, tmp_path):
    def load(profile, **options):
        profile.save(tmp_path / "named.json")
        warnings = []
        known = load_estimator(
            str(tmp_path / "named.json"), loaded, new_tokens=1, timer_for=of_cpu_time, warn=warnings.append, **options
        )
        assert known.estimator.coefficients == profile.coefficients
        return warnings

    assert load(profiled) == []
    (wrong,) = load(scaled(profiled, 20))
    assert re.search(r"named.json does not hold now: estimated .* It is used as it is\. For a new run, profile", wrong)
    (busy,) = load(replace(profiled, cpu_share=0.4))
    assert "its answers had the CPU for 40% of the time" in busy
    elsewhere = replace(scaled(profiled, 20), machine=replace(profiled.machine, cpu="another"))
    assert load(elsewhere, allow_mismatch=True) == [], "it was accepted as it is"


def test_ranks_get_the_same_and_none_waits_for_one_that_has_failed(loaded, cache, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT, "GROUPWISE_CACHE", str(cache.parent))
    ended = on_ranks(2, [TESTS / "dist" / "estimator_worker.py", loaded.name, cache.parent])
    assert ended.returncode == 0, ended.stderr
    first, second = (json.loads((cache.parent / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["error"] == "this rank has no questions"
    assert len(list(cache.glob("*.json"))) == 1


def test_a_check_of_a_slow_model_ends_after_five_answers(loaded, profiled):
    def slow(executor):
        return lambda *_: time.sleep(0.5) or MeasuredLatency({}, 500.0)

    checked = current_speed(KnobLatencyEstimator(profiled, loaded.options), loaded, timer_for=slow)
    assert checked.answers == 5
    assert checked.has_drifted
