"""The command line in a process with the device under test, which can be made to fail in the middle of a run.

    python -m accelerator.command [--lose STAGE:STEP:RANK | --kill STAGE:STEP:RANK] COMMAND ...

STAGE is a function of the loop. At its call in that step the rank is killed, or its (emulated) device fails after a few
kernels. The recipe `accelerator.command:small` is the one that GROUPWISE_TEST_RECIPE names, in a small shape.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from accelerator import emulated
from accelerator.steps import small_recipe
from groupwise.cli.main import main
from groupwise.dist.comm import exit_now
from groupwise.training import loop
from groupwise.training.config import Config

RECIPE = "accelerator.command:small"
DEVICE = os.environ.get("GROUPWISE_TEST_DEVICE", emulated.NAME)
_KERNELS = 5
"""That still run on a device once the stage has begun."""


def small() -> Config:
    return small_recipe(os.environ["GROUPWISE_TEST_RECIPE"], device=DEVICE)


def at_stage(stage: str, step: int, fail: Callable[[], None]) -> None:
    """Call `fail` when the loop comes to this stage of this step."""
    function: Callable[..., Any] = getattr(loop, stage)

    def failing(setup: Any, *arguments: Any) -> Any:
        if setup.state.step == step:
            fail()
        return function(setup, *arguments)

    setattr(loop, stage, failing)


def lose_device() -> None:
    emulated.register().lose_after(_KERNELS)


def kill_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if DEVICE == emulated.NAME:
        emulated.register()
    if arguments[0] in ("--lose", "--kill"):
        stage, step, rank = arguments[1].split(":")
        if os.environ.get("RANK", "0") == rank:
            at_stage(stage, int(step), lose_device if arguments[0] == "--lose" else kill_process)
        arguments = arguments[2:]
    exit_now(main(arguments))
