"""Communication between ranks: gather, sum, agree on failure, sum gradients. With one rank nothing is sent."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from groupwise.core.errors import OutOfMemoryError, UserError, is_out_of_memory
from groupwise.dist.devices import reduce_dtype
from groupwise.dist.launcher import listen_on_loopback, was_restarted

BUCKET_NUMEL = 1 << 22
"""Elements per all-reduce when gradients are summed: small tensors share one bucket."""

_ON_ALL_RANKS = "raised_on_all_ranks"


class PeerFailure(Exception):  # noqa: N818 - no error of this rank
    """Another rank has failed; `fail_together` raises its error here."""


@dataclass(frozen=True)
class Comm:
    """This process's rank, and the collectives that training needs."""

    rank: int
    ranks: int
    device: torch.device
    _state: PartialState = field(repr=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, rank after rank, on the CPU. Every rank passes the same number of rows."""
        if self.ranks == 1:
            return rows.cpu()
        raw = rows.contiguous().view(torch.uint8).to(self.device)  # bytes: not every backend sends float64
        parts = [torch.empty_like(raw) for _ in range(self.ranks)]
        dist.all_gather(parts, raw)
        return torch.cat(parts).cpu().view(rows.dtype)

    def gather_objects(self, objects: Sequence[Any]) -> list[Any]:
        """The (picklable) objects of all ranks, rank after rank."""
        return list(objects) if self.ranks == 1 else list(gather_object(list(objects)))

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

        Any exception of a user's code becomes a `UserError` that names its line; running out of memory on some rank,
        without another failure, becomes an `OutOfMemoryError`.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # noqa: BLE001 - a user's code may raise anything
            error = raised
        failures = self._collect_failures(error, what)
        if failures:
            _raise_together(failures, error, self.ranks)

    def proceed(self) -> None:
        """Before a collective within `fail_together`: raise if a rank has failed and will not take part."""
        if self.any(False):
            raise PeerFailure

    def _collect_failures(self, error: Exception | None, what: str) -> list[_RankFailure]:
        """The failures of all ranks, in order of rank: the same list everywhere."""
        own: list[_RankFailure] = []
        if isinstance(error, PeerFailure):
            _release_frames(error)
            return self.gather_objects(own)
        if error is not None:
            own = [_RankFailure(self.rank, _error_message(error, what), is_out_of_memory(error))]
            if own[0].out_of_memory:
                _release_frames(error)
        return self.gather_objects(own) if self.any(bool(own)) else []

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.ranks == 1:
            return value
        return broadcast_object_list([value])[0]

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.ranks > 1:
            self._state.wait_for_everyone()

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
            buffers = {bucket[0].dtype: bucket[0].new_empty(largest) for bucket in buckets}
        for bucket in buckets:
            flat = bucket[0].view(-1)
            if len(bucket) > 1:
                buffer = buffers[flat.dtype][: _numel(bucket)]
                flat = torch.cat([gradient.flatten() for gradient in bucket], out=buffer)
            dist.all_reduce(flat)
            sums = flat.split([gradient.numel() for gradient in bucket])
            for gradient, summed in zip(bucket, sums, strict=True):
                gradient.copy_(summed.view_as(gradient))

    def _reduce(self, numbers: Sequence[float], operation: Any) -> list[float]:
        if self.ranks == 1:
            return [float(number) for number in numbers]
        reduced = torch.tensor(numbers, dtype=reduce_dtype(self.device), device=self.device)
        dist.all_reduce(reduced, op=operation)
        return [float(number) for number in reduced.tolist()]


@dataclass(frozen=True)
class _RankFailure:
    rank: int
    message: str
    out_of_memory: bool


def _raise_together(failures: Sequence[_RankFailure], error: Exception | None, ranks: int) -> NoReturn:
    """The first error that is not about memory, else the first out-of-memory error."""
    for failure in failures:
        if not failure.out_of_memory:
            together = UserError(failure.message)
            setattr(together, _ON_ALL_RANKS, True)
            raise together from error
    first = failures[0]
    raise OutOfMemoryError(f"{first.message} (rank {first.rank} of {ranks})" if ranks > 1 else first.message) from None


def is_on_all_ranks(error: Exception) -> bool:
    """Whether `fail_together` has raised it, so that no rank is without it."""
    return getattr(error, _ON_ALL_RANKS, False)


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


def connect() -> Comm:
    """Join the ranks that `accelerate launch` or `torchrun` started; a single rank when neither did."""
    listen_on_loopback()
    state = PartialState(cpu=not torch.accelerator.is_available(), **_store_of_this_attempt())
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes != launched:
        raise UserError(
            f"WORLD_SIZE is {launched}, but the process group has {state.num_processes}: each process would train alone."
            " Launch with `torchrun --nproc-per-node N -m groupwise ...` or `accelerate launch`."
        )
    return Comm(state.process_index, state.num_processes, state.device, state)


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


def exit_now() -> NoReturn:
    """Exit with code 0: exit functions run and output is flushed, but the interpreter is not shut down.

    A gloo thread that outlives the interpreter can abort the process (pytorch issues 179291 and 190489), and the
    launcher would then report a finished run as failed.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(0)
