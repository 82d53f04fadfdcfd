"""Everything a run stands on: ranks, workload, shape, state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from groupwise.core.errors import UserError
from groupwise.core.placement import place
from groupwise.core.shape import UNKNOWN_DATASET_SIZE, StepShape
from groupwise.dist.comm import Comm, connect
from groupwise.dist.process import configure_process
from groupwise.dist.trackers import check_installed
from groupwise.memory.measure import used_bytes
from groupwise.memory.recovery import RowLimits, check_shrinkable
from groupwise.training.checkpoint import read_meta
from groupwise.training.config import Config
from groupwise.training.state import State, create_state
from groupwise.workloads.base import Workload


@dataclass(frozen=True)
class Setup:
    """Everything a run stands on, made once."""

    config: Config
    comm: Comm
    workload: Workload
    shape: StepShape
    state: State
    base_bytes: int = 0
    """What the process held before the workload was built; on a device, nothing."""


def set_up(config: Config, checkpoint: Path | None = None) -> Setup:
    """Join the ranks, build the workload, and refuse what does not fit. A checkpoint to go on from has a say in it."""
    configure_process(config.run.threads)
    comm = connect()
    check_installed(config.run.trackers)
    config.shape(
        conditions=UNKNOWN_DATASET_SIZE, ranks=comm.ranks
    )  # what no dataset could mend is refused before one is read
    base = used_bytes(comm.device)
    with comm.fail_together(f"build() of {type(config.workload).__name__}"):
        settings = config.workload.for_resume(checkpoint) if checkpoint else config.workload
        workload = settings.build(comm.device)
        for name in ("policy", "num_conditions"):
            if not hasattr(workload, name):
                raise UserError(f"{type(workload).__name__} has no '{name}': a workload sets it in its __init__.")
    check_shrinkable(workload, config.run.may_shrink)
    shape = config.shape(conditions=workload.num_conditions, ranks=comm.ranks)
    place(shape, seed=config.seed, step=0)  # a placement of the user's own is refused here, before anything is written
    state = create_state(workload.policy, config.optimizer)
    state.cut = RowLimits(shape.rows_per_pass)
    setup = Setup(config, comm, workload, shape, state, base)
    return _with_chosen_rows(setup, checkpoint) if config.rows_per_pass == "auto" else setup


def _with_chosen_rows(setup: Setup, checkpoint: Path | None) -> Setup:
    """rows_per_pass auto: a number from here on. A run that goes on keeps its own, which is in the checkpoint."""
    from groupwise.training.probe import choose_rows

    rows = choose_rows(setup) if checkpoint is None else read_meta(checkpoint)["config"]["rows_per_pass"]
    config = replace(setup.config, rows_per_pass=rows)
    setup.state.cut = RowLimits(rows)
    shape = config.shape(conditions=setup.workload.num_conditions, ranks=setup.comm.ranks)
    return replace(setup, config=config, shape=shape)
