"""`train(config)`: a run from start to end. Resume, preflight, steps, logs, checkpoints, stop signals, summary."""

from __future__ import annotations

import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupwise.core.errors import UserError
from groupwise.core.io.json_types import is_number
from groupwise.dist.comm import Comm, connect
from groupwise.dist.launcher import is_launched, stop_with_launcher
from groupwise.training.config import Config, memory_settings, to_dict
from groupwise.training.loop import training_steps
from groupwise.training.preflight import Check, preflight, refuse_failures
from groupwise.training.progress import ProgressDisplay
from groupwise.training.run_folder.abrupt_end import explain_abrupt_end
from groupwise.training.run_folder.checkpoint import check_same_config, check_same_files, restore
from groupwise.training.run_folder.folder import RunFolder, reward_of
from groupwise.training.setup import Setup, describe_sharding, ignore_warning, set_up
from groupwise.training.step_log import StepLog
from groupwise.workloads.checkpoint_files import newest_valid_checkpoint, read_metadata

_SAME_REQUEST_S = 5.0


@dataclass(frozen=True)
class MeanAndStd:
    """Of the same number in several steps."""

    mean: float
    std: float

    @staticmethod
    def of(values: Sequence[float]) -> MeanAndStd | None:
        return MeanAndStd(statistics.fmean(values), statistics.pstdev(values)) if values else None


@dataclass(frozen=True)
class RunSummary:
    """How a run ended. Times are measured."""

    run_dir: Path
    steps: int
    seconds: float
    reward_first_tenth: MeanAndStd | None
    """Over the steps of the whole run, those before a resume included; None where no step has a reward."""
    reward_last_tenth: MeanAndStd | None
    eval_before: Mapping[str, float]
    eval_after: Mapping[str, float]
    interrupted: bool
    is_main: bool


def train(config: Config) -> RunSummary:
    """Train as the config says. The same call on one process and on many ranks."""
    start, comm = time.perf_counter(), connect(config.run.device, timeout_s=config.run.rank_timeout_s)
    with comm.heartbeat.watch(), comm.explain_lost_device():
        return _train_on_ranks(config, comm, start)


def _train_on_ranks(config: Config, comm: Comm, start: float) -> RunSummary:
    folder = RunFolder(run_dir(config))
    display = ProgressDisplay(config, silent=not comm.is_main)
    if comm.broadcast_object(comm.is_main and folder.is_of_this_job()):
        config = _continued(config, comm, display)
    with comm.fail_together("Looking at the run folder"):
        if comm.is_main:
            folder.refuse_other_run(resume=config.run.resume)  # before a model is loaded
    checkpoint = newest_valid_checkpoint(folder.checkpoints, ignore_warning) if config.run.resume else None
    start_files = folder.start_files() if config.run.resume else None
    setup = set_up(config, checkpoint, start_files=start_files, warn=display.warn)
    with setup.comm.fail_together("Locking the run folder"):
        if setup.comm.is_main:
            folder.lock(resume=config.run.resume)
    try:
        with display, stop_with_launcher(), setup.comm.explain_lost_device():
            _show_sharding(setup, display)
            _resume(setup, folder, display)
            _preflight(setup, display)
            interrupted = _train(setup, folder, display)
    finally:
        folder.release()
    return _summary(setup, folder, time.perf_counter() - start, interrupted)


def _continued(config: Config, comm: Comm, display: ProgressDisplay) -> Config:
    """For ranks that the launcher has started again, perhaps fewer of them than before."""
    if comm.ranks == 1 and config.shard == "full":
        display.warn("One rank is left, which has nobody to share weights with: the run goes on without --shard full.")
        config = replace(config, shard="none")
    return replace(config, run=replace(config.run, resume=True))


def check(config: Config) -> tuple[list[Check], bool]:
    """Preflight alone, nothing written; and whether this is the rank that prints."""
    comm = connect(config.run.device)
    display = ProgressDisplay(config, silent=not comm.is_main)
    with comm.explain_lost_device():
        setup = set_up(config, warn=display.warn)
        _show_sharding(setup, display)
        return preflight(setup), comm.is_main


def _show_sharding(setup: Setup, display: ProgressDisplay) -> None:
    text = describe_sharding(setup)
    if text:
        display.print(text)


def run_dir(config: Config) -> Path:
    if config.run.run_dir is None:
        raise UserError(
            "run.run_dir is None: a run from Python must name its folder. Set it with gw.RunConfig(run_dir=...); a"
            " recipe has runs/ and its name."
        )
    return Path(config.run.run_dir)


def _resume(setup: Setup, folder: RunFolder, display: ProgressDisplay) -> None:
    """Set the state to the newest valid checkpoint, if any, and the files of the run folder to the state."""
    config, comm, state = setup.config, setup.comm, setup.state
    with comm.fail_together("Reading the checkpoints"):
        reads = comm.is_main and config.run.resume
        newest = newest_valid_checkpoint(folder.checkpoints, display.warn) if reads else None
    path = comm.broadcast_object(newest)
    if path is not None:
        check_same_config(path, to_dict(config))
        check_same_files(path, setup.workload.checkpoint_files())
        restore(path, state)
        _restore_row_limits(setup, path, display)
        display.print(
            f"{folder.path} has {state.step} steps and --steps is {config.steps}: nothing is left to train."
            if state.step >= config.steps
            else f"Resuming {folder.path} after step {state.step}."
        )
    elif config.run.resume:
        display.print(f"No checkpoint in {folder.path} yet: starting at step 0.")
    display.start_at(state.step)
    if comm.is_main:
        reason = explain_abrupt_end(folder.predecessor, next(iter(folder.metrics()[-1:]), {}))
        if reason:
            display.warn(reason)
        folder.rewind(state.step, display.warn)
        folder.write("config.json", to_dict(config))
        if not state.step:
            folder.write_start(setup.workload.checkpoint_files())
        if setup.monitor.plan is not None:
            folder.write("plan.json", setup.monitor.plan.to_dict())


def _restore_row_limits(setup: Setup, path: Path, display: ProgressDisplay) -> None:
    """Limits that were halved when memory ran out stay so, unless the user has changed a memory setting since."""
    metadata = read_metadata(path)
    if memory_settings(metadata["config"]) == memory_settings(to_dict(setup.config)):
        lowered = setup.recovery.restore(metadata["row_limits"])
        if lowered:
            limits = ", ".join(f"{name} {rows}" for name, rows in lowered.items())
            display.warn(f"Memory ran out earlier in this run: continuing with {limits}.")


def _preflight(setup: Setup, display: ProgressDisplay) -> None:
    if setup.config.run.preflight and setup.state.step < setup.config.steps:
        checks = preflight(setup)
        display.show_checks(checks)
        refuse_failures(checks)


def _train(setup: Setup, folder: RunFolder, display: ProgressDisplay) -> bool:
    """Step, log, evaluate, save. Returns whether the user stopped the run."""
    config, state = setup.config, setup.state
    with StepLog(setup, folder, display) as log:
        if not state.step:
            log.evaluate("before")
        with handle_stop_signals(display.print) as stop_requested:
            for step in training_steps(setup):
                log.record(step)
                log.check_writer()
                stopping = setup.comm.any(stop_requested())
                if config.run.eval_every and state.step % config.run.eval_every == 0:
                    log.evaluate(f"step {state.step}")
                if stopping or state.step % config.run.checkpoint_every == 0 or state.step == config.steps:
                    log.save()
                if stopping:
                    log.wait_for_checkpoint()
                    display.print(f"Stopped after step {state.step}; checkpoint written. Continue with --resume.")
                    return True
            log.evaluate("after")
            if setup.recovery.oom_retries:
                log.save()  # the row limits that this evaluation has halved
    return False


@contextmanager
def handle_stop_signals(print_line: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Yields whether a stop was requested by Ctrl-C or SIGTERM. The second one raises KeyboardInterrupt.

    Only the main thread receives signals. Under a launcher Ctrl-C arrives twice, from the terminal and from torchrun,
    so a second one within a few seconds is the same.
    """
    stop_requested: list[float] = []
    same_request_s = _SAME_REQUEST_S if is_launched() else 0.0
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def on_signal(_number: int, _frame: object) -> None:
        now = time.monotonic()
        if stop_requested and now - stop_requested[0] < same_request_s:
            return
        if stop_requested:
            raise KeyboardInterrupt
        stop_requested.append(now)
        print_line("Stopping: finishing this step and writing a checkpoint. Once more to exit immediately.")

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    failed = True
    try:
        yield lambda: bool(stop_requested)
        failed = False
    finally:
        if not (failed and is_launched()):  # the launcher ends all ranks when one fails: let this one save and explain
            for number, handler in previous.items():
                signal.signal(number, handler)


def _summary(setup: Setup, folder: RunFolder, seconds: float, interrupted: bool) -> RunSummary:
    steps, evaluation = folder.metrics(), folder.read("eval.json")
    tenth = max(1, len(steps) // 10)

    def reward(entries: Sequence[Mapping[str, Any]]) -> MeanAndStd | None:
        return MeanAndStd.of([reward for entry in entries if (reward := reward_of(entry)) is not None])

    return RunSummary(
        run_dir=folder.path,
        steps=setup.state.step,
        seconds=seconds,
        reward_first_tenth=reward(steps[:tenth]),
        reward_last_tenth=reward(steps[-tenth:]),
        eval_before=_numbers(evaluation.get("before")),
        eval_after=_numbers(evaluation.get("after")),
        interrupted=interrupted,
        is_main=setup.comm.is_main,
    )


def _numbers(metrics: object) -> dict[str, float]:
    """The metrics of one evaluation in eval.json, without what a run of ours would not have written."""
    entries = metrics.items() if isinstance(metrics, dict) else ()
    return {name: float(value) for name, value in entries if is_number(value)}
