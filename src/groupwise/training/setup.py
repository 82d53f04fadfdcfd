"""Setup: everything that the stages of a run share. Ranks, workload, shape, state, memory monitor and recovery."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from groupwise.core.errors import UserError
from groupwise.core.placement import place
from groupwise.core.shape import UNKNOWN_DATASET_SIZE, StepShape
from groupwise.dist.comm import Comm, connect
from groupwise.dist.deferred_weights import deferring_weights, load_deferred, weights_are_loaded
from groupwise.dist.process import configure_process
from groupwise.dist.sharding import blocks_of, is_sharded, ranks_per_node, rollout_mode, shard
from groupwise.dist.trackers import check_installed
from groupwise.memory.measure import device_bytes, used_bytes
from groupwise.memory.monitor import Monitor
from groupwise.memory.plan import MemoryModel, evaluate_setting, needs_sharding
from groupwise.memory.recovery import GENERAL_ADVICE, LIMIT_NAMES, Recovery
from groupwise.memory.sharding import Sharding
from groupwise.memory.stages import StepSpec
from groupwise.training.config import Config
from groupwise.training.nonfinite import NonfinitePolicy
from groupwise.training.state import State, create_state
from groupwise.training.step_timer import StepTimer
from groupwise.workloads.base import Workload, WorkloadConfig
from groupwise.workloads.checkpoint_files import read_metadata

Warn = Callable[[str], None]


@dataclass(frozen=True)
class Setup:
    """Everything that the stages of a run share, made once."""

    config: Config
    comm: Comm
    workload: Workload
    shape: StepShape
    state: State
    monitor: Monitor
    recovery: Recovery
    nonfinite: NonfinitePolicy
    timer: StepTimer = field(default_factory=StepTimer)


def ignore_warning(text: str) -> None:
    """For callers without a display: metrics.jsonl has the retries of every step all the same."""


def set_up(
    config: Config,
    checkpoint: Path | None = None,
    *,
    start_files: Path | None = None,
    warn: Warn = ignore_warning,
) -> Setup:
    """Connect the ranks, build the workload and refuse what does not fit. The workload may read the checkpoint, or what
    a run without one has written at its start."""
    configure_process(config.run.threads)
    comm = connect(config.run.device)
    check_installed(config.run.trackers)
    config.shape(conditions=UNKNOWN_DATASET_SIZE, ranks=comm.ranks)  # refused before a dataset is read
    base_bytes = used_bytes(comm.device)
    sharded = _is_to_be_sharded(config, comm)
    with deferring_weights(sharded):
        workload = _build_workload(config, comm, checkpoint or start_files)
    if sharded:
        _shard(config, comm, workload)
    state = create_state(workload.policy, config.optimizer)
    setup = _assemble(config, comm, workload, state, base_bytes, warn)
    for text in workload.reporter.start_warnings():
        warn(text)
    place(setup.shape, seed=config.seed, step=0)  # a user's own placement is refused before anything is written
    if config.rows_per_pass == "auto":
        config = replace(config, rows_per_pass=_choose_rows(setup, checkpoint))
        setup = _assemble(config, comm, workload, state, base_bytes, warn)
    return setup


def known_memory(workload: WorkloadConfig) -> MemoryModel | None:
    """The workload's memory model; None where there is none, such as for a model on the hub before it is loaded."""
    try:
        return workload.memory_model()
    except UserError:
        return None


def _build_workload(config: Config, comm: Comm, saved: Path | None) -> Workload:
    with comm.fail_together(f"build() of {type(config.workload).__name__}"):
        settings = config.workload.for_resume(saved) if saved else config.workload
        workload = settings.build(comm.device)
        for name in ("policy", "num_conditions"):
            if not hasattr(workload, name):
                raise UserError(f"{type(workload).__name__} has no '{name}': a workload sets it in its __init__.")
        known = sorted({name for names in LIMIT_NAMES.values() for name in names})
        for name in workload.row_limits:
            if name not in known:
                raise UserError(
                    f"row_limits of {type(workload).__name__} has '{name}': the limits that a stage can halve are"
                    f" {', '.join(known)}."
                )
    return workload


def _is_to_be_sharded(config: Config, comm: Comm) -> bool:
    if config.shard == "none" or (config.shard == "auto" and _fits_unsharded(config, comm)):
        return False
    if comm.ranks == 1:
        raise UserError(
            f"shard is '{config.shard}' and there is one rank, so there is nothing to share. Launch several with"
            " `torchrun --nproc-per-node N -m groupwise ...`, or leave --shard away."
        )
    return True


def _shard(config: Config, comm: Comm, workload: Workload) -> None:
    blocks, kind = workload.shard_blocks() or blocks_of(workload.policy), type(workload.policy).__name__
    if not blocks:
        raise UserError(
            f"shard is '{config.shard}', and {type(workload).__name__} does not say which blocks of its policy ({kind})"
            " to gather one at a time: there is no list of layers (nn.ModuleList) in it. Define shard_blocks() in the"
            " workload, or train without --shard."
        )
    sharding = _sharding(config, comm)
    shard(
        workload.policy,
        blocks,
        comm,
        frozen=workload.frozen_models(),
        rollout=_rollout_mode(config, comm, sharding),
        ranks_per_shard=sharding.ranks,
        compute_dtype=workload.shard_dtype(),
        load=partial(load_deferred, device=comm.device),
    )
    with comm.fail_together("Checking the loaded weights"):
        weights_are_loaded(workload.policy)


def _fits_unsharded(config: Config, comm: Comm) -> bool:
    """By the memory plan of a rank that holds everything; also where there is none, or nobody to share with."""
    model = known_memory(config.workload)
    if model is None or comm.ranks == 1:
        return True
    return not needs_sharding(model, config.step_spec(ranks=comm.ranks), _smallest_device(comm))


def _sharding(config: Config, comm: Comm) -> Sharding:
    shared_by = ranks_per_node(comm) if config.shard_over == "node" else comm.ranks
    return Sharding(shared_by, config.shard_over, config.shard_rollout, config.shard_exchange)


def _rollout_mode(config: Config, comm: Comm, sharding: Sharding) -> Literal["whole", "blocks"]:
    """As set; with auto by the memory plan, and whole where there is none."""
    model = known_memory(config.workload)
    if model is not None:
        spec = replace(config.step_spec(ranks=comm.ranks), sharding=sharding)
        sharding = evaluate_setting(model, spec, _smallest_device(comm)).spec.sharding or sharding
    return "blocks" if sharding.rollout == "blocks" else "whole"


def describe_sharding(setup: Setup) -> str:
    """How the policy is sharded, for a person who starts a run; empty where it is not."""
    config, policy = setup.config, setup.workload.policy
    if not is_sharded(policy):
        return ""
    mode = rollout_mode(policy)
    gathers = {"whole": "gather all weights first", "blocks": "gather block by block"}[mode]
    known = "the memory plan" if known_memory(config.workload) else "default, without a memory plan"
    decided = known if config.shard_rollout == "auto" else f"--shard-rollout {mode}"
    return f"Sharded over {_sharding(config, setup.comm).ranks} ranks; rollouts {gathers} ({decided})."


def _smallest_device(comm: Comm) -> int:
    """Bytes; so that all ranks decide alike."""
    return int(-comm.max(-float(device_bytes(comm.device)))[0])


def step_spec(config: Config, comm: Comm, workload: Workload, state: State) -> StepSpec:
    """What the plan of this run needs to know, also how its policy is sharded."""
    spec = config.step_spec(ranks=comm.ranks, fused_optimizer=state.fused)
    if not is_sharded(workload.policy):
        return spec
    return replace(spec, sharding=replace(_sharding(config, comm), rollout=rollout_mode(workload.policy)))


def _assemble(config: Config, comm: Comm, workload: Workload, state: State, base_bytes: int, warn: Warn) -> Setup:
    shape = config.shape(conditions=workload.num_conditions, ranks=comm.ranks)
    monitor = Monitor(
        known_memory(config.workload),
        step_spec(config, comm, workload, state),
        device_bytes=device_bytes(comm.device),
        base_bytes=base_bytes,
        on_accelerator=comm.device.type != "cpu",
        warn=warn,
    )
    recovery = Recovery(
        workload,
        rows_per_pass=shape.rows_per_pass,
        rows_per_rank=shape.rollouts_per_rank,
        warn=warn,
        advice=lambda: monitor.reductions() or GENERAL_ADVICE,
        begin=lambda stage: comm.heartbeat.begin(f"step {state.step}, {stage}"),
    )
    state.row_limits = recovery.limits
    return Setup(config, comm, workload, shape, state, monitor, recovery, NonfinitePolicy(config.run))


def _choose_rows(setup: Setup, checkpoint: Path | None) -> int:
    """rows_per_pass auto as a number. A resumed run keeps its number, which is in the checkpoint."""
    from groupwise.training.probe import choose_rows

    if checkpoint is None:
        return choose_rows(setup)
    rows = read_metadata(checkpoint)["config"].get("rows_per_pass")
    if not isinstance(rows, int):
        raise UserError(f"The checkpoint {checkpoint} does not say its rows_per_pass. Set one: --rows-per-pass 8.")
    return rows
