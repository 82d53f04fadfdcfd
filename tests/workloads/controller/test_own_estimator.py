"""A machine's own estimator: made once, by one process, for all."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from groupwise.latency.estimator import LatencyEstimator
from groupwise.latency.records import PREFILL, MeasuredLatency
from groupwise.latency.regression import Observation
from groupwise.workloads.controller.latency.source import cached_estimator

TESTS = Path(__file__).parents[2]
PROCESS = """
import sys, time
from pathlib import Path
from workloads.controller.test_own_estimator import estimator
from groupwise.workloads.controller.latency.source import cached_estimator

def make():
    with open(Path(sys.argv[1]) / "made", "a") as file:
        file.write("once ")
    time.sleep(0.5)
    return estimator()

print(cached_estimator("tiny", make, model="tiny", folder=Path(sys.argv[1])).coefficients)
"""


def estimator() -> LatencyEstimator:
    """10 ms, and 2 ms a block."""
    seen = [
        Observation(f"{n % 10} blocks", f"{n % 7}", {PREFILL: {"blocks": n % 10}}, MeasuredLatency({PREFILL: ms}, ms))
        for n in range(70)
        if (ms := 10.0 + 2.0 * (n % 10))
    ]
    return LatencyEstimator.fit(seen, model="tiny")


def own(key, make, folder):
    return cached_estimator(key, make, model="tiny", folder=folder)


def test_it_is_made_once_and_found_again(tmp_path):
    made = []

    def make():
        made.append(1)
        return estimator()

    first, again = own("tiny", make, tmp_path), own("tiny", make, tmp_path)
    assert made == [1]
    assert first.coefficients == again.coefficients
    assert np.array_equal(first.ratios, again.ratios)
    own("tiny", make, tmp_path / "elsewhere")
    own("tiny, longer answers", make, tmp_path)
    assert made == [1, 1, 1]


def test_processes_that_start_together_share_what_one_of_them_makes(tmp_path):
    command = [sys.executable, "-c", PROCESS, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TESTS) for _ in range(2)]
    said = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert said[0] == said[1] != ""
    assert (tmp_path / "made").read_text() == "once "
