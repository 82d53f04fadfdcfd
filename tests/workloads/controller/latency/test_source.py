"""The cached estimator of this machine: fitted once, by one process, for all."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from groupwise.latency.estimator import LatencyEstimator
from groupwise.latency.records import PREFILL, MeasuredLatency
from groupwise.latency.regression import Observation
from groupwise.workloads.controller.latency.source import cached_estimator

TESTS = Path(__file__).parents[3]
PROCESS = """
import sys, time
from pathlib import Path
from workloads.controller.latency.test_source import estimator
from groupwise.workloads.controller.latency.source import cached_estimator

def fit():
    with open(Path(sys.argv[1]) / "made", "a") as file:
        file.write("once ")
    time.sleep(0.5)
    return estimator()

print(cached_estimator("tiny", fit, model="tiny", folder=Path(sys.argv[1])).coefficients)
"""


def estimator() -> LatencyEstimator:
    """10 ms, and 2 ms a block."""
    seen = [
        Observation(f"{n % 10} blocks", f"{n % 7}", {PREFILL: {"blocks": n % 10}}, MeasuredLatency({PREFILL: ms}, ms))
        for n in range(70)
        if (ms := 10.0 + 2.0 * (n % 10))
    ]
    return LatencyEstimator.fit(seen, model="tiny")


def cached(key, fit, folder):
    return cached_estimator(key, fit, model="tiny", folder=folder)


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
