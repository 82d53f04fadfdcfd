"""Follow a real step with fake tensors: every storage is counted while it lives, and none takes memory.

The one module of `plan` that imports torch. Fake tensors live on the CPU: an autograd step on fake accelerator tensors
aborts a process that has no accelerator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from groupwise.memory.stages import StepSpec

_aten = torch.ops.aten


class LiveByteCounter(TorchDispatchMode):
    """Counts the bytes of all tensors that operations made and that still live, and their highest sum.

    Questions about values, which fake tensors do not have, are answered so that most memory is used: nothing is equal
    to zero, no special case applies.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}

    def watch(self, *tensors: Tensor) -> None:
        """Count these, too: what was there before."""
        for tensor in tensors:
            self._see(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if args and isinstance(args[0], FakeTensor) and func in _VALUE_DEPENDENT_OPS:
            return self._kept(_VALUE_DEPENDENT_OPS[func](*args, **(kwargs or {})))
        return self._kept(func(*args, **(kwargs or {})))

    def _kept(self, result: Any) -> Any:
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            size = storage.nbytes()
            self._live[key] = (weakref.ref(storage, lambda _: self._gone(key)), size)
            self.now += size
            self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self._live.pop(key)[1]


def _number(tensor: Tensor) -> float:
    return 0.0 if tensor.dtype.is_floating_point else 0


def _nonzero(tensor: Tensor) -> Tensor:
    return tensor.new_empty((tensor.numel(), tensor.ndim), dtype=torch.int64)


def _indexed(tensor: Tensor, indices: list[Tensor | None]) -> Tensor:
    """A mask takes all that it could, or what it does where its values are known."""
    known = [_places(index) if index is not None and index.dtype == torch.bool else [index] for index in indices]
    return _aten.index.Tensor(tensor, [index for part in known for index in part])


def _places(mask: Tensor) -> list[Tensor]:
    found = _nonzero(mask) if isinstance(mask, FakeTensor) else mask.nonzero()
    return list(found.unbind(1))


def _counts(numbers: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    return numbers.new_empty(minlength, dtype=torch.int64)


def _grouped_shape(left: Tensor, right: Tensor, ends: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """What a product of groups of rows gives. Torch's own rule for fake tensors knows bfloat16 alone."""
    if left.ndim == right.ndim == 2 and ends is not None:
        return left.new_empty((len(ends), left.shape[0], right.shape[1]))
    return left.new_empty((*left.shape[:-1], right.shape[-1]))


_VALUE_DEPENDENT_OPS: dict[Any, Callable[..., Any]] = {
    _aten._local_scalar_dense.default: _number,
    _aten.item.default: _number,
    _aten.nonzero.default: _nonzero,
    _aten.index.Tensor: _indexed,
    _aten.bincount.default: _counts,
    _aten._grouped_mm.default: _grouped_shape,
}
"""Instead of operations whose result depends on values."""


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Within, new tensors have shapes but no memory. They stay so outside, beside real ones."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def replace_with_fake(module: nn.Module, mode: FakeTensorMode) -> None:
    """Give a module's real parameters and buffers, such as those of a new adapter, fake ones in their place."""
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            if not isinstance(weight.data, FakeTensor) and not isinstance(weight, FakeTensor):
                fake = nn.Parameter(mode.from_tensor(weight.data), requires_grad=weight.requires_grad)
                part._parameters[name] = fake
        for name, buffer in list(part.named_buffers(recurse=False)):
            if not isinstance(buffer, FakeTensor):
                part._buffers[name] = mode.from_tensor(buffer)


def trace_update(policy: nn.Module, one: Callable[[], Tensor], job: StepSpec, *, more: tuple[Tensor, ...] = ()) -> int:
    """Highest number of bytes while a pass is scored, goes backward and AdamW takes its step.

    A pass returns its loss. It is the job's last: where others went before it, their gradient is there already, as
    AdamW's moments are, so that nothing is followed twice. `more` is what is held besides, such as a reference.
    """
    trained = [weight for weight in policy.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=job.fused, foreach=not job.fused)
    with LiveByteCounter() as live:
        live.watch(*policy.parameters(), *policy.buffers(), *more)
        for weight in trained:
            moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[weight] = {"step": torch.tensor(1.0), **moments}
            weight.grad = torch.zeros_like(weight) if job.shape.passes > 1 else None
        one().backward()
        optimizer.step()
        return live.peak


def trace_peak(act: Callable[[], object], *held: Tensor) -> int:
    """Highest number of bytes during `act`, with what is held besides."""
    with LiveByteCounter() as live, torch.no_grad():
        live.watch(*held)
        act()
        return live.peak
