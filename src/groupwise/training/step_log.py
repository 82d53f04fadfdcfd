"""What is written about the steps of a run: logs, trackers, display, evaluations, checkpoints; when a step fails, the
complete steps before it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from groupwise.core.errors import UserError
from groupwise.dist.devices import is_lost
from groupwise.dist.heartbeat import is_lost_rank
from groupwise.dist.sharding import is_sharded
from groupwise.dist.trackers import Trackers
from groupwise.training.config import to_dict
from groupwise.training.evaluate import write_evaluation
from groupwise.training.loop import StepResult
from groupwise.training.nonfinite import NonfiniteError
from groupwise.training.progress import ProgressDisplay
from groupwise.training.run_folder.checkpoint_writer import CheckpointWriter, write_checkpoint
from groupwise.training.run_folder.folder import METRICS, RunFolder
from groupwise.training.setup import Setup


class StepLog:
    """Everything that is written about the steps: logs, trackers, display, evaluations and checkpoints.

    When a step fails, the complete steps before it are saved. Checkpoints are written beside the steps that follow.
    """

    def __init__(self, setup: Setup, folder: RunFolder, display: ProgressDisplay):
        self._setup, self._folder, self._display = setup, folder, display
        self._trackers = Trackers(setup.config.run.trackers, folder.path, to_dict(setup.config))
        self._complete_step, self._complete_updates = setup.state.step, setup.state.updates
        self._last_step: StepResult | None = None
        self._writer = CheckpointWriter(
            folder.checkpoints,
            setup.comm,
            keep=setup.config.run.keep_checkpoints,
            sync_logs=folder.sync_logs,
            warn=display.warn,
        )

    def __enter__(self) -> Self:
        self._setup.comm.heartbeat.save = self._save_when_stuck
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._writer.wait()
            elif isinstance(error, Exception):
                self._save_complete_steps(error)
            else:
                self._writer.stop()
        finally:
            self._setup.comm.heartbeat.save = None
            self._trackers.close()

    def record(self, step: StepResult) -> None:
        """One complete step: to metrics.jsonl, samples.jsonl, the trackers and the display."""
        setup = self._setup
        self._complete_step, self._complete_updates = setup.state.step, setup.state.updates
        memory = setup.monitor.record(step.memory, setup.state.row_limits["rows_per_pass"])
        self._last_step = step = replace(step, memory=memory)
        if setup.comm.is_main:
            self._append(step)
        memory_metrics = {f"memory/{name}": float(value) for name, value in memory.to_dict().items()}
        self._trackers.log({**step.metrics, **memory_metrics}, step.step)
        self._display.show_step(step)
        if step.skipped:
            self._display.warn(f"Step {step.step + 1} is skipped: {step.skipped}")
        warning = setup.workload.reporter.step_warning(step.metrics)
        if warning and setup.config.run.on_warning == "stop":
            raise UserError(warning)
        self._display.show_step_details(step, warning)

    def _append(self, step: StepResult) -> None:
        folder, max_bytes = self._folder, self._setup.config.run.samples_mib << 20
        folder.append(METRICS, [{"step": step.step, **step.metrics, "memory_bytes": step.memory.to_dict()}])
        folder.append_samples(step.samples, max_bytes=max_bytes)
        folder.append_nonfinite(step.skipped_samples, max_bytes=max_bytes)

    def evaluate(self, moment: str) -> None:
        metrics, images = write_evaluation(self._setup, self._folder, moment)
        step = self._setup.state.step
        self._trackers.log({f"eval/{name}": value for name, value in metrics.items()}, step)
        self._trackers.log_images(
            {path.stem.removeprefix(f"{moment.replace(' ', '-')}-"): path for path in images}, step
        )

    def save(self) -> None:
        """Copy the state; it is written meanwhile, once the checkpoint before it is."""
        setup = self._setup
        setup.comm.heartbeat.begin(f"step {setup.state.step}, checkpoint")
        with setup.comm.fail_together(f"checkpoint_files() of {type(setup.workload).__name__}"):
            content = self._checkpoint_content()
        self._writer.start(setup.state, **content)

    def check_writer(self) -> None:
        """Raise what a checkpoint that is being written has failed with."""
        self._writer.poll()

    def wait_for_checkpoint(self) -> None:
        self._writer.wait()

    def _save_complete_steps(self, error: Exception) -> None:
        state, comm = self._setup.state, self._setup.comm
        if comm.is_main:
            with suppress(OSError):  # a full disk must not hide what ended the run
                self._folder.write_traceback(error)
            if isinstance(error, NonfiniteError):
                self._folder.append_nonfinite(error.samples, max_bytes=self._setup.config.run.samples_mib << 20)
        together = is_sharded(state.policy) and isinstance(error, UserError) and error.on_all_ranks
        if not together:  # other ranks may not have failed
            self._writer.end_alone()
        if isinstance(error, OSError) or self._writer.failed or is_lost(comm.device):
            return  # the disk refuses what this would write, or the weights cannot be read any more
        if not self._is_complete():
            comm.heartbeat.saved = "It was lost in the middle of an update, which nobody can save."
        elif together:
            self.save()
            self._writer.wait()
            comm.heartbeat.saved = f"Step {state.step} is saved."
        elif is_sharded(state.policy):
            comm.heartbeat.saved = (
                "The run is sharded and no rank has the whole state, so the steps since the newest checkpoint are lost."
            )
        elif comm.is_main:
            self._write_alone()
            comm.heartbeat.saved = f"Step {state.step} is saved."
        elif is_lost_rank(error) and 0 in comm.heartbeat.lost_ranks():
            comm.heartbeat.saved = self._save_for_first_rank()

    def _is_complete(self) -> bool:
        """Whether the state is that after a step which is in the log."""
        state = self._setup.state
        return 0 < state.step == self._complete_step and state.updates == self._complete_updates

    def _save_for_first_rank(self) -> str:
        """The first rank is gone, and with it who writes. Each of the others has the whole state and the last step."""
        last = self._last_step
        if last is None:
            return "No step was trained since the newest checkpoint."
        with self._folder.taken_over() as taken:
            if not taken:
                return "Rank 0 still holds the folder, or another rank saves: look there for the newest checkpoint."
            self._folder.rewind(last.step)
            self._append(last)
            self._write_alone()
        return f"Rank {self._setup.comm.rank} has saved step {self._setup.state.step} in its place."

    def _save_when_stuck(self) -> str:
        """While the training thread is in a call that does not return: it changes nothing meanwhile."""
        if not self._setup.comm.is_main:
            return "Rank 0 saves the complete steps."
        if not self._is_complete() or is_sharded(self._setup.state.policy):
            return "The newest checkpoint is what is left."
        self._writer.end_alone()
        self._write_alone()
        return f"Step {self._setup.state.step} is saved."

    def _write_alone(self) -> None:
        """The whole state, by this rank, without asking others."""
        self._folder.sync_logs()
        keep = self._setup.config.run.keep_checkpoints
        write_checkpoint(self._folder.checkpoints, self._setup.state, keep=keep, **self._checkpoint_content())

    def _checkpoint_content(self) -> dict[str, Any]:
        setup = self._setup
        files = setup.workload.checkpoint_files()
        return {"config": to_dict(setup.config), "ranks": setup.comm.ranks, "files": files}
