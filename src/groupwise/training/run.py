"""A run from start to end: its folder, its checks, its checkpoints, and a clean way out.
A clean way out: Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from groupwise.core.errors import UserError
from groupwise.dist.comm import Comm
from groupwise.dist.trackers import Trackers
from groupwise.memory.measure import device_bytes
from groupwise.memory.monitor import Monitor, known_memory
from groupwise.memory.recovery import GENERAL_ADVICE, Recovery
from groupwise.training.checkpoint import (
    check_same_config,
    check_same_files,
    newest_valid_checkpoint,
    read_meta,
    restore,
    write_checkpoint,
)
from groupwise.training.config import Config, memory_settings, to_dict
from groupwise.training.evaluate import log_evaluation
from groupwise.training.loop import StepResult, training_steps
from groupwise.training.preflight import Check, preflight, refuse_failures
from groupwise.training.progress import ProgressDisplay
from groupwise.training.run_folder import RunFolder
from groupwise.training.setup import Setup, set_up


@contextmanager
def handle_stop_signals(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM finish the step and save; a second Ctrl-C leaves at once. Only a main thread gets signals."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def on_signal(number: int, _frame: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        say("Stopping: finishing this step and writing a checkpoint. Once more to leave at once.")

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class RunSummary:
    """How a run ended. Times are measured."""

    run_dir: Path
    steps: int
    seconds: float
    first_reward: float | None
    last_reward: float | None
    eval_before: Mapping[str, float]
    eval_after: Mapping[str, float]
    interrupted: bool
    is_main: bool


def train(config: Config) -> RunSummary:
    """Train as the config says. The same call on one process and on many ranks."""
    begun = time.perf_counter()
    folder = RunFolder(run_dir(config))
    setup = set_up(config, _newest(folder) if config.run.resume else None)
    config = setup.config
    with setup.comm.fail_together("Claiming the run folder"):
        if setup.comm.is_main:
            folder.claim(resume=config.run.resume)
    try:
        with ProgressDisplay(
            steps=config.steps,
            rollouts_per_step=setup.shape.rollouts_per_step,
            silent=not setup.comm.is_main,
        ) as screen:
            watch = _watch(setup, folder, screen)
            _resume(setup, folder, screen, watch.recovery)
            _preflight(setup, screen, watch.recovery)
            interrupted = _train(setup, folder, screen, watch)
    finally:
        folder.release()
    return _summary(setup, folder, time.perf_counter() - begun, interrupted)


@dataclass(frozen=True)
class Watch:
    """What looks after memory during a run."""

    recovery: Recovery
    monitor: Monitor


def _watch(setup: Setup, folder: RunFolder, screen: ProgressDisplay) -> Watch:
    config, on_cpu = setup.config, setup.comm.device.type == "cpu"
    monitor = Monitor(
        known_memory(config.workload),
        config.step_spec(ranks=setup.comm.ranks, fused_optimizer=setup.state.fused),
        device=device_bytes(setup.comm.device),
        base=setup.base_bytes,
        accelerator=not on_cpu,
        warn=screen.warn,
    )
    if monitor.plan is not None and setup.comm.is_main:
        folder.write("plan.json", monitor.plan.to_dict())
    recovery = Recovery(setup.workload, setup.state.cut, setup.shape, screen.warn, grow_after=config.run.grow_after)
    recovery.may_shrink = config.run.may_shrink
    recovery.lower_first = lambda: monitor.lower_first() or GENERAL_ADVICE
    return Watch(recovery, monitor)


def check(config: Config) -> tuple[list[Check], bool]:
    """Preflight alone, nothing written; and whether this is the rank that speaks."""
    setup = set_up(config)
    checks = preflight(setup.workload, state=setup.state, shape=setup.shape, config=config, comm=setup.comm)
    return checks, setup.comm.is_main


def run_dir(config: Config) -> Path:
    if config.run.run_dir is None:
        raise UserError(
            "run.run_dir is None: a run from Python must name its folder. Set it with gw.RunConfig(run_dir=...); a"
            " recipe has runs/ and its name."
        )
    return Path(config.run.run_dir)


def _newest(folder: RunFolder) -> Path | None:
    """The checkpoint that `_resume` will take; it warns of damaged ones."""
    return newest_valid_checkpoint(folder.checkpoints, lambda text: None)


def _resume(setup: Setup, folder: RunFolder, screen: ProgressDisplay, recovery: Recovery) -> None:
    """Set the state to the newest good checkpoint, and the logs with it."""
    config, comm = setup.config, setup.comm
    wanted = comm.is_main and config.run.resume
    with comm.fail_together("Reading the checkpoints"):
        found = newest_valid_checkpoint(folder.checkpoints, screen.warn) if wanted else None
    path = comm.broadcast_object(found)
    if path is not None:
        check_same_config(path, to_dict(config))
        check_same_files(path, setup.workload.checkpoint_files())
        restore(path, setup.state)
        _resume_cut(path, config, recovery)
        done = setup.state.step >= config.steps
        screen.say(
            f"{folder.path} has {setup.state.step} steps and --steps is {config.steps}: nothing is left to train."
            if done
            else f"Resuming {folder.path} after step {setup.state.step}."
        )
    elif config.run.resume:
        screen.say(f"No checkpoint in {folder.path} yet: starting at step 0.")
    screen.begin_at(setup.state.step)
    if comm.is_main:
        folder.rewind(setup.state.step)
        folder.write("config.json", to_dict(config))


def _resume_cut(path: Path, config: Config, recovery: Recovery) -> None:
    """Where memory ran out before, the smaller pieces stay; unless the user has set other ones since."""
    meta = read_meta(path)
    if "cut" in meta and memory_settings(meta["config"]) == memory_settings(to_dict(config)):
        recovery.restore(meta["cut"])
        if recovery.cut.lowered:
            held = ", ".join(f"{name} {rows}" for name, rows in recovery.cut.rows().items())
            recovery.warn(f"Memory ran out earlier in this run: going on with {held}.")


def _preflight(setup: Setup, screen: ProgressDisplay, recovery: Recovery) -> None:
    if setup.config.run.preflight and setup.state.step < setup.config.steps:
        checks = recovery.whole(
            preflight,
            setup.workload,
            state=setup.state,
            shape=setup.shape,
            config=setup.config,
            comm=setup.comm,
            again=recovery.attempt,
        )
        screen.checks(checks)
        refuse_failures(checks)


def _train(setup: Setup, folder: RunFolder, screen: ProgressDisplay, watch: Watch) -> bool:
    """Step, log, save. Returns whether the user stopped it."""
    config, comm, state = setup.config, setup.comm, setup.state
    trackers, again = Trackers(config.run.trackers, folder.path, to_dict(config)), watch.recovery.attempt
    if not state.step:
        log_evaluation(setup, folder, trackers, "before", again=again)
    complete = state.updates
    with handle_stop_signals(screen.say) as stop_asked:
        try:
            for done in training_steps(
                setup.workload, state=state, shape=setup.shape, config=config, comm=comm, recovery=watch.recovery
            ):
                complete = state.updates
                step = replace(done, memory=watch.monitor.see(done.memory, state.cut.rows_per_pass))
                _log(step, folder, trackers, comm)
                screen.step(step.step, step.metrics, step.memory)
                screen.look(step, _step_warning(setup, step), samples_every=config.run.show_samples_every)
                stopping = comm.any(stop_asked())
                if config.run.eval_every and state.step % config.run.eval_every == 0:
                    log_evaluation(setup, folder, trackers, f"step {state.step}", again=again)
                if stopping or state.step % config.run.checkpoint_every == 0 or state.step == config.steps:
                    _save(setup, folder)
                if stopping:
                    screen.say(f"Stopped after step {state.step}; checkpoint written. Continue with --resume.")
                    return True
            log_evaluation(setup, folder, trackers, "after", again=again)
            if watch.recovery.shortages:
                _save(setup, folder)  # the cut that this evaluation has lowered
            return False
        except Exception as error:
            if comm.is_main:
                folder.explain(error)
            if state.updates == complete and state.step:
                _write_checkpoint(setup, folder)  # other ranks may not have failed: nobody is waited for
            raise
        finally:
            trackers.close()


def _log(step: StepResult, folder: RunFolder, trackers: Trackers, comm: Comm) -> None:
    if comm.is_main:
        folder.append("metrics.jsonl", [{"step": step.step, **step.metrics, "memory_bytes": step.memory.to_dict()}])
        folder.append("samples.jsonl", step.samples)
    trackers.log({**step.metrics, **{f"memory/{n}": float(v) for n, v in step.memory.to_dict().items()}}, step.step)


def _save(setup: Setup, folder: RunFolder) -> None:
    _write_checkpoint(setup, folder)
    setup.comm.barrier()


def _write_checkpoint(setup: Setup, folder: RunFolder) -> None:
    if setup.comm.is_main:
        write_checkpoint(
            folder.checkpoints,
            setup.state,
            config=to_dict(setup.config),
            ranks=setup.comm.ranks,
            keep=setup.config.run.keep_checkpoints,
            files=setup.workload.checkpoint_files(),
        )


def _summary(setup: Setup, folder: RunFolder, seconds: float, interrupted: bool) -> RunSummary:
    metrics, evaluation = folder.metrics(), folder.read("eval.json")
    return RunSummary(
        run_dir=folder.path,
        steps=setup.state.step,
        seconds=seconds,
        first_reward=metrics[0]["reward"] if metrics else None,
        last_reward=metrics[-1]["reward"] if metrics else None,
        eval_before=evaluation.get("before", {}),
        eval_after=evaluation.get("after", {}),
        interrupted=interrupted,
        is_main=setup.comm.is_main,
    )


def _step_warning(setup: Setup, step: StepResult) -> str | None:
    """The workload's warning about a step; ends the run where the user asked for that."""
    warning = setup.workload.reporter.step_warning(step.metrics)
    if warning and setup.config.run.on_warning == "stop":
        raise UserError(warning)
    return warning
