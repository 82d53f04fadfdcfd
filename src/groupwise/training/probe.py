"""A trial step: its measured peak memory, and the choice of `rows_per_pass auto`. The run's state is not changed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from groupwise.core.errors import OutOfMemoryError
from groupwise.core.placement import place
from groupwise.core.shape import even_pass_sizes
from groupwise.core.types import Rollouts
from groupwise.dist.sharding import call_block, passes_in_step
from groupwise.memory.measure import PeakMemory, device_bytes
from groupwise.memory.plan import AGGRESSIVE, MemoryModel
from groupwise.memory.recovery import RngAndBuffers, release_memory
from groupwise.memory.stages import StepSpec
from groupwise.training.config import Config
from groupwise.training.rollout import compute_rewards, generate_rollouts
from groupwise.training.setup import Setup, known_memory, set_up, step_spec
from groupwise.training.state import missing_adam_state, reserve_optimizer_memory

FULL = 0.9
"""Share of the device that a probed step may take."""


def probe(config: Config) -> dict[str, int]:
    """Peak bytes of a rollout and of an update, on this device with this config."""
    setup = set_up(config)
    peaks: dict[str, int] = {}
    with _restored_after(setup):
        with _peak_counter(setup) as peak:
            rollouts = _trial_rollout(setup)
            peaks["rollout"] = peak()
        with _peak_counter(setup) as peak:
            _trial_update(setup, rollouts)
            peaks["update"] = peak()
    return peaks


def choose_rows(setup: Setup) -> int:
    """The largest rows_per_pass, of passes of equal size, that the plan (if any) and a trial step both allow.

    After a trial that does not fit the next one has half the rows, so that few steps are tried.
    """
    model = known_memory(setup.config.workload)
    smallest_device = -setup.comm.max(-float(device_bytes(setup.comm.device)))[0]  # so that all ranks decide alike
    spec = step_spec(setup.config, setup.comm, setup.workload, setup.state)
    most = setup.shape.rollouts_per_rank
    for rows in even_pass_sizes(most):
        if rows > most:
            continue
        planned = _planned(model, spec, rows) if model is not None else None
        if planned is None or planned <= AGGRESSIVE * smallest_device:
            measured = _measured(setup, rows)
            if measured is not None and measured <= FULL * smallest_device:
                return rows
            most = rows // 2
    return 1


def _planned(model: MemoryModel, spec: StepSpec, rows: int) -> int:
    return model.predict(replace(spec, shape=replace(spec.shape, rows_per_pass=rows))).with_margin().peak


def _measured(setup: Setup, rows: int) -> int | None:
    """The highest peak of all ranks in a step; None where a rank ran out of memory."""
    setup.state.row_limits["rows_per_pass"] = rows
    with _restored_after(setup):
        peak = PeakMemory(setup.comm.device)
        try:
            _trial_update(setup, _trial_rollout(setup))
        except OutOfMemoryError:
            return None
        return peak.over_ranks(setup.comm).peak


def _trial_rollout(setup: Setup) -> Rollouts:
    """As in every step but the first: with the optimizer's moments in memory."""
    with setup.comm.fail_together("Reserving memory for the optimizer"):
        moments = missing_adam_state(setup.state)
    placement = place(setup.shape, seed=setup.config.seed, step=setup.state.step)
    rollouts = generate_rollouts(setup, placement)
    compute_rewards(setup, rollouts)
    del moments
    return rollouts


def _trial_update(setup: Setup, rollouts: Rollouts) -> None:
    """Two passes, the second while the first one's gradient is held; and memory for the optimizer."""
    rows = setup.state.row_limits["rows_per_pass"]
    policy = setup.state.policy
    with setup.comm.fail_together(f"score() of {type(setup.workload).__name__}"), passes_in_step(policy):
        part = rollouts.select(torch.arange(min(rows, len(rollouts))))
        for _ in range(2 if rows < len(rollouts) else 1):
            for score in setup.workload.score_parts(part):
                call_block(policy, score).logp.sum().backward()
        reserve_optimizer_memory(setup.state)


@contextmanager
def _restored_after(setup: Setup) -> Iterator[None]:
    before = RngAndBuffers.capture(setup.state.policy)
    try:
        yield
    finally:
        setup.state.optimizer.zero_grad(set_to_none=True)
        before.restore(setup.state.policy)
        release_memory()


@contextmanager
def _peak_counter(setup: Setup) -> Iterator[Callable[[], int]]:
    """Bytes as the device counts them; on the CPU, where only the whole process is visible, tensor by tensor."""
    if setup.comm.device.type != "cpu":
        peak = PeakMemory(setup.comm.device)
        yield lambda: peak.over_ranks(setup.comm).peak
        return
    from groupwise.memory.trace import LiveByteCounter

    with LiveByteCounter() as live:
        live.include(*(tensor for tensor in gc.get_objects() if issubclass(type(tensor), torch.Tensor)))
        yield lambda: live.peak
