"""Communication between ranks: gather, sum, agree on failure, sum gradients. With one rank nothing is sent."""

from __future__ import annotations

import atexit
import math
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from groupwise.core.errors import DeviceLostError, OutOfMemoryError, UserError, is_out_of_memory
from groupwise.core.io.user_code import contain_exits, exit_process
from groupwise.core.shape import BUCKET_NUMEL
from groupwise.dist.devices import choose_device, is_lost
from groupwise.dist.heartbeat import Heartbeat
from groupwise.dist.launcher import listen_on_loopback, was_restarted

DEFAULT_TIMEOUT_S = 1800.0
"""Longer than rank 0 may evaluate alone while the others wait."""


class PeerFailure(Exception):  # noqa: N818 - no error of this rank
    """Another rank has failed; `fail_together` raises its error here."""


@dataclass(frozen=True)
class Comm:
    """This process's rank, and the collectives that training needs."""

    rank: int
    ranks: int
    device: torch.device
    sums_on_host: bool = False
    """Whether gradients are copied to the host to be summed: where torch has no backend for the device."""
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(0, 1, DEFAULT_TIMEOUT_S), repr=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, rank after rank, on the CPU. Every rank passes the same number of rows."""
        if self.ranks == 1:
            return rows.cpu()
        own = rows.contiguous().cpu()
        parts = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather([part.view(torch.uint8) for part in parts], own.view(torch.uint8))
        return torch.cat(parts)

    def gather_objects(self, objects: Sequence[Any]) -> list[Any]:
        """The (picklable) objects of all ranks, rank after rank."""
        if self.ranks == 1:
            return list(objects)
        by_rank: list[Any] = [None] * self.ranks
        dist.all_gather_object(by_rank, list(objects))
        return [entry for entries in by_rank for entry in entries]

    def sum(self, *numbers: float) -> list[float]:
        """The sum of each number over the ranks."""
        return self._reduce(numbers, dist.ReduceOp.SUM)

    def max(self, *numbers: float) -> list[float]:
        """The maximum of each number over the ranks."""
        return self._reduce(numbers, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self.max(float(flag))[0] > 0

    @contextmanager
    def fail_together(self, what: str) -> Iterator[None]:
        """When one rank fails in this block, all ranks raise the same error, so that none is left waiting.

        Any exception of a user's code becomes a `UserError` that names its line, a device that has failed a
        `DeviceLostError`; running out of memory on some rank, without another failure, an `OutOfMemoryError`.
        """
        error: Exception | None = None
        try:
            with contain_exits():
                yield
        except Exception as raised:  # noqa: BLE001 - a user's code may raise anything
            error = raised
        failures = self._collect_failures(error, what)
        if failures:
            _raise_together(failures, error, self.ranks)

    @contextmanager
    def explain_lost_device(self) -> Iterator[None]:
        """The same for what is outside of `fail_together`, on this rank alone."""
        try:
            yield
        except RuntimeError as error:
            if not is_lost(self.device):
                raise
            raise DeviceLostError(self._lost_device(error)) from error

    def _lost_device(self, error: Exception) -> str:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return (
            f"The device {self.device} of rank {self.rank} has failed at {self.heartbeat.activity} and does not answer"
            f" any more ({reason}). The checkpoints are complete: --resume continues from the newest one, in a new"
            " process. If the same step fails again, try it with --device cpu, which names an index that is out of"
            " range, the usual reason for a failed kernel; if not, look at the device (nvidia-smi, npu-smi info, the"
            " system's log) and leave it out."
        )

    def proceed(self) -> None:
        """Before a collective within `fail_together`: raise if a rank has failed and will not take part."""
        self.least_request(None)

    def least_request(self, number: int | None, room: float = math.inf) -> tuple[int | None, float]:
        """The least number that a rank asks for, None where none asks; and the least `room` of a rank.

        Raises as `proceed` does.
        """
        failed, least, room = self._failed_or_least(failed=False, request=number, room=room)
        if failed:
            raise PeerFailure
        return least, room

    def _failed_or_least(
        self, *, failed: bool, request: int | None = None, room: float = math.inf
    ) -> tuple[bool, int | None, float]:
        """Whether a rank has failed, and the least request, in one all-reduce: ranks that fail meet ranks that ask."""
        asked = math.inf if request is None else float(request)
        any_failed, least, least_room = self.max(float(failed), -asked, -room)
        return any_failed > 0, None if least == -math.inf else int(-least), -least_room

    def _collect_failures(self, error: Exception | None, what: str) -> list[_RankFailure]:
        """The failures of all ranks, in order of rank: the same list everywhere."""
        own: list[_RankFailure] = []
        if isinstance(error, PeerFailure):
            _release_frames(error)
            return self.gather_objects(own)
        if error is not None:
            out_of_memory = is_out_of_memory(error)
            lost = isinstance(error, RuntimeError) and not out_of_memory and is_lost(self.device)
            message = self._lost_device(error) if lost else _error_message(error, what)
            own = [_RankFailure(self.rank, message, out_of_memory, lost)]
            if out_of_memory:
                _release_frames(error)
        any_failed, *_ = self._failed_or_least(failed=bool(own))
        return self.gather_objects(own) if any_failed else []

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.ranks == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.ranks > 1:
            dist.barrier()

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum gradients over the ranks: large ones in place, small ones in buckets.

        A rank without rows contributes zeros, so no rank waits for it; a parameter without a gradient gets zeros on
        every rank, with one rank as with many. Sharded gradients are sums already. All ranks have allocated their
        memory before anything is sent.
        """
        with self.fail_together("Allocating memory to sum the gradients"):
            gradients = [_gradient(parameter) for parameter in parameters]
            whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
            buckets = _buckets(whole) if self.ranks > 1 else []
            largest = max((_numel(bucket) for bucket in buckets if len(bucket) > 1), default=0)
            examples = {bucket[0].dtype: bucket[0] for bucket in buckets}
            buffers = {dtype: example.new_empty(largest) for dtype, example in examples.items()}
        for bucket in buckets:
            flat = bucket[0].view(-1)
            if len(bucket) > 1:
                buffer = buffers[flat.dtype][: _numel(bucket)]
                flat = torch.cat([gradient.flatten() for gradient in bucket], out=buffer)
            self._sum_in_place(flat)
            sums = flat.split([gradient.numel() for gradient in bucket])
            for gradient, summed in zip(bucket, sums, strict=True):
                gradient.copy_(summed.view_as(gradient))

    def _sum_in_place(self, values: Tensor) -> None:
        if not self.sums_on_host:
            dist.all_reduce(values)
            return
        on_host = values.cpu()
        dist.all_reduce(on_host)
        values.copy_(on_host)

    def _reduce(self, numbers: Sequence[float], operation: Any) -> list[float]:
        """On the host, in float64: not all devices have it, and none has to be waited for."""
        if self.ranks == 1:
            return [float(number) for number in numbers]
        reduced = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(reduced, op=operation)
        return [float(number) for number in reduced.tolist()]


@dataclass(frozen=True)
class _RankFailure:
    rank: int
    message: str
    out_of_memory: bool
    device_lost: bool = False


def _raise_together(failures: Sequence[_RankFailure], error: Exception | None, ranks: int) -> NoReturn:
    """The first lost device, else the first error that is not about memory, else the first out-of-memory error."""
    for failure in failures:
        if failure.device_lost:
            raise DeviceLostError(failure.message) from error
    for failure in failures:
        if not failure.out_of_memory:
            together = UserError(failure.message)
            together.on_all_ranks = True
            raise together from error
    first = failures[0]
    exhausted = OutOfMemoryError(f"{first.message} (rank {first.rank} of {ranks})" if ranks > 1 else first.message)
    exhausted.on_all_ranks = True
    raise exhausted from None


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if not parameter.grad.is_contiguous():
        parameter.grad = parameter.grad.contiguous()
    return parameter.grad


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Gradients of one dtype with at most BUCKET_NUMEL elements together; a larger one is alone."""
    buckets: list[list[Tensor]] = []
    for gradient in sorted(gradients, key=lambda gradient: str(gradient.dtype)):
        last = buckets[-1] if buckets else []
        if last and last[0].dtype == gradient.dtype and _numel(last) + gradient.numel() <= BUCKET_NUMEL:
            last.append(gradient)
        else:
            buckets.append([gradient])
    return buckets


def _numel(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _release_frames(error: BaseException) -> None:
    """Free the tensors of the failed calls: a traceback keeps the local variables of its frames alive."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__


def _error_message(error: Exception, what: str) -> str:
    """One sentence: what was called, what it raised, and in which line of the user's code."""
    if isinstance(error, UserError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename and "groupwise" not in frame.filename]
    line = f" ({(own or frames)[-1].filename}:{(own or frames)[-1].lineno})" if frames else ""
    return f"{what} raised {type(error).__name__}: {error}{line}."


def connect(device: str | None = None, *, timeout_s: float | None = None) -> Comm:
    """Join the ranks that `accelerate launch` or `torchrun` started; a single rank when neither did.

    `device` names another device than the one that torch reports. The time limit, of several ranks that of the first
    call, is the longest that a rank waits for another, or makes no progress.
    """
    listen_on_loopback()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if ranks > 1 and missing:
        raise UserError(
            f"WORLD_SIZE is {ranks}, but {', '.join(missing)} is not set: each process would train alone."
            " Launch with `torchrun --nproc-per-node N -m groupwise ...` or `accelerate launch`."
        )
    own = choose_device(device)
    if ranks == 1:
        return Comm(0, 1, own, heartbeat=_heartbeat(0, 1, timeout_s))
    backend = dist.Backend.default_device_backend_map.get(own.type)
    if not dist.is_initialized():
        by_device = {"cpu": "gloo"} if backend is None else {"cpu": "gloo", own.type: backend}
        backends = ",".join(f"{kind}:{name}" for kind, name in by_device.items())
        limit = timedelta(seconds=timeout_s or DEFAULT_TIMEOUT_S)
        dist.init_process_group(backends, timeout=limit, **_store_of_this_attempt())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    comm = Comm(rank, ranks, own, sums_on_host=backend is None, heartbeat=_heartbeat(rank, ranks, timeout_s))
    _refuse_mixed_devices(comm)
    return comm


def connected() -> Comm:
    """This process among the ranks that `connect` has joined; alone before. Nothing is sent."""
    if not dist.is_initialized():
        return Comm(0, 1, torch.device("cpu"))
    return Comm(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


def _refuse_mixed_devices(comm: Comm) -> None:
    types = comm.gather_objects([comm.device.type])
    if len({*types}) > 1:
        ranks_of = {kind: [rank for rank, other in enumerate(types) if other == kind] for kind in dict.fromkeys(types)}
        listed = "; ".join(f"{kind}: ranks {', '.join(map(str, ranks))}" for kind, ranks in ranks_of.items())
        raise UserError(
            f"The ranks are on different devices ({listed}), whose results differ in rounding. Start all of them where"
            " the same device is available, or give --device cpu to all."
        )


_heartbeats: list[Heartbeat] = []
"""The one of this process, as torch has one process group."""


def _heartbeat(rank: int, ranks: int, timeout_s: float | None) -> Heartbeat:
    if not _heartbeats or _heartbeats[0].ranks != ranks:
        _heartbeats[:] = [Heartbeat(rank, ranks, timeout_s or DEFAULT_TIMEOUT_S)]
    own = _heartbeats[0]
    if ranks > 1:
        own.start()
    elif timeout_s is not None:
        own.timeout_s = timeout_s
    return own


def _store_of_this_attempt() -> dict[str, Any]:
    """For restarted ranks, arguments of init_process_group with a store that no earlier attempt has written to.

    torchrun's static rendezvous keeps its store when it restarts ranks, and with it the addresses of those that died.
    """
    agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if dist.is_initialized() or not (was_restarted() and agent_has_store):
        return {}
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, ranks, is_master=False)  # type: ignore[attr-defined]
    attempt = f"groupwise attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}"
    prefixed = dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]
    return {"store": prefixed, "rank": rank, "world_size": ranks}


def disconnect() -> None:
    """Leave the process group, all ranks together: one that exits while others still communicate may abort.

    Only after success. When a rank has failed, the others may be waiting elsewhere, and the launcher ends them.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def exit_now(code: int = 0) -> NoReturn:
    """Exit with this code: exit functions run and output is flushed, but the interpreter is not shut down.

    A gloo thread that outlives the interpreter can abort the process (pytorch issues 179291 and 190489), and the
    launcher would then report a finished run as failed.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    exit_process(code)
