"""Runs the tests in `on_device` in processes that have registered the emulated accelerator, which cannot be undone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ENVIRONMENT

from accelerator import emulated

ON_DEVICE = Path(__file__).with_name("on_device")
MISSING = emulated.missing_tools()
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"the emulated accelerator cannot be built without {', '.join(MISSING)}"),
    pytest.mark.timeout(900),
]


def run_on_device(marker: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", marker, str(ON_DEVICE)]
    environment = {**ENVIRONMENT, "GROUPWISE_TEST_DEVICE": emulated.NAME, "PATH": os.environ["PATH"]}
    ended = subprocess.run(
        command, cwd=ON_DEVICE.parents[2], env=environment, capture_output=True, text=True, timeout=880, check=False
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]


def test_the_device_and_one_step_of_recipes_on_it():
    run_on_device("not device")


@pytest.mark.device
def test_all_that_runs_on_a_device():
    run_on_device("device")
