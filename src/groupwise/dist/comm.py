"""Ranks that talk: gathers, sums and agreement, over Accelerate. With one rank nothing is sent."""

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

from groupwise.core.errors import OutOfMemoryError, UserError, is_out_of_memory
from groupwise.dist.devices import reduce_dtype

BUCKET_NUMEL = 1 << 22
"""Numbers that are sent together when gradients are summed: small tensors share one exchange."""


@dataclass(frozen=True)
class Comm:
    """This process's place among the ranks, and the few exchanges that training needs."""

    rank: int
    ranks: int
    device: torch.device
    _state: PartialState = field(repr=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, rank after rank, on the CPU. Every rank brings the same number."""
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
        """Each number added up over the ranks."""
        return self._reduce(numbers, dist.ReduceOp.SUM)

    def max(self, *numbers: float) -> list[float]:
        return self._reduce(numbers, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on any rank."""
        return self.max(float(flag))[0] > 0

    @contextmanager
    def fail_together(self, what: str) -> Iterator[None]:
        """What fails on one rank fails on all of them with the same message, so that nobody is left waiting.

        Inside runs what a user wrote; whatever it raises is told as theirs to mend, with the line it came from. When
        memory ran out, and nothing worse happened, `OutOfMemoryError` is raised.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a user's code may raise anything
            failure = error
        short, message = is_out_of_memory(failure), None if failure is None else _error_message(failure, what)
        if failure is not None and short:
            _release_frames(failure)
        if self.any(message is not None):
            everyone = [(*found, rank) for rank, found in enumerate(self.gather_objects([(short, message)]))]
            for found_short, told, _ in everyone:
                if told is not None and not found_short:
                    raise UserError(told) from failure
            _, told, rank = next(found for found in everyone if found[0])
            raise OutOfMemoryError(f"{told} (rank {rank} of {self.ranks})" if self.ranks > 1 else told) from None

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.ranks == 1:
            return value
        return broadcast_object_list([value])[0]

    def barrier(self) -> None:
        """Until all ranks are here."""
        if self.ranks > 1:
            self._state.wait_for_everyone()

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up gradients over the ranks: large ones where they are, small ones packed together.

        A rank that had no rows brings zeros, so nobody waits for it; a parameter without a gradient has zero
        everywhere, with one rank as with many. All memory is taken, and everyone has it, before anything is sent.
        """
        with self.fail_together("Making room to sum the gradients"):
            gradients = [_gradient(parameter) for parameter in parameters]
            packs = _buckets(gradients) if self.ranks > 1 else []
            largest = max((_numel(pack) for pack in packs if len(pack) > 1), default=0)
            room = {pack[0].dtype: pack[0].new_empty(largest) for pack in packs}
        for pack in packs:
            flat = pack[0].view(-1)
            if len(pack) > 1:
                flat = torch.cat([part.flatten() for part in pack], out=room[flat.dtype][: _numel(pack)])
            dist.all_reduce(flat)
            for part, total in zip(pack, flat.split([part.numel() for part in pack]), strict=True):
                part.copy_(total.view_as(part))

    def _reduce(self, numbers: Sequence[float], operation: Any) -> list[float]:
        if self.ranks == 1:
            return [float(number) for number in numbers]
        packed = torch.tensor(numbers, dtype=reduce_dtype(self.device), device=self.device)
        dist.all_reduce(packed, op=operation)
        return [float(number) for number in packed.tolist()]


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if not parameter.grad.is_contiguous():
        parameter.grad = parameter.grad.contiguous()
    return parameter.grad


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Runs of gradients of one dtype with at most PACK numbers; a larger one is alone."""
    packs: list[list[Tensor]] = []
    for gradient in sorted(gradients, key=lambda gradient: str(gradient.dtype)):
        last = packs[-1] if packs else []
        if last and last[0].dtype == gradient.dtype and _numel(last) + gradient.numel() <= BUCKET_NUMEL:
            last.append(gradient)
        else:
            packs.append([gradient])
    return packs


def _numel(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _release_frames(error: BaseException) -> None:
    """Let go of what the failed calls held: their frames keep every tensor that they had a name for."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__


def _error_message(error: Exception, what: str) -> str:
    """An error of the user's own code in a sentence: what was called, what it raised, and where."""
    if isinstance(error, UserError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename and "groupwise" not in frame.filename]
    place = f" ({(own or frames)[-1].filename}:{(own or frames)[-1].lineno})" if frames else ""
    return f"{what} raised {type(error).__name__}: {error}{place}."


def connect() -> Comm:
    """Join the ranks that `accelerate launch` or `torchrun` started; alone when neither did."""
    state = PartialState(cpu=not torch.accelerator.is_available())
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes != launched:
        raise UserError(
            f"{launched} processes were launched, but this one finds {state.num_processes} in its group: each would train"
            " alone. Launch with `torchrun --nproc-per-node N -m groupwise ...` or `accelerate launch`."
        )
    return Comm(state.process_index, state.num_processes, state.device, state)


def disconnect() -> None:
    """Leave the ranks, all together: a process that ends while others still talk to it may abort.

    Only after success. When a rank has failed, the others may be waiting elsewhere, and their launcher ends them.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def exit_now() -> NoReturn:
    """End this process in success: with all that was registered for its end, but without taking the interpreter down.

    A thread of gloo's that outlives the interpreter can abort the process (pytorch issues 179291 and 190489), and the
    launcher takes a run that is done for one that has failed.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(0)
