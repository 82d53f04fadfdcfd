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

_aten = torch.ops.aten


class LiveBytes(TorchDispatchMode):
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
        if args and isinstance(args[0], FakeTensor):
            if func is _aten._local_scalar_dense.default:
                return 0.0 if args[0].dtype.is_floating_point else 0
            if func is _aten.nonzero.default:
                return self._kept(args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.int64))
            if func is _aten._grouped_mm.default:
                return self._kept(_grouped_shape(*args[:3]))
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


def _grouped_shape(left: Tensor, right: Tensor, ends: Tensor | None = None) -> Tensor:
    """What a product of groups of rows gives. Torch's own rule for fake tensors knows bfloat16 alone."""
    if left.ndim == right.ndim == 2 and ends is not None:
        return left.new_empty((len(ends), left.shape[0], right.shape[1]))
    return left.new_empty((*left.shape[:-1], right.shape[-1]))


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Within, new tensors have shapes but no memory. They stay so outside, beside real ones."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def make_fake(module: nn.Module, mode: FakeTensorMode) -> None:
    """Give a module's real parameters and buffers, such as those of a new adapter, fake ones in their place."""
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            if not isinstance(weight.data, FakeTensor) and not isinstance(weight, FakeTensor):
                fake = nn.Parameter(mode.from_tensor(weight.data), requires_grad=weight.requires_grad)
                part._parameters[name] = fake
        for name, buffer in list(part.named_buffers(recurse=False)):
            if not isinstance(buffer, FakeTensor):
                part._buffers[name] = mode.from_tensor(buffer)


def traced_update(
    policy: nn.Module, passes: list[Callable[[], Tensor]], *, more: tuple[Tensor, ...] = (), steps: int = 2
) -> int:
    """Highest number of bytes while passes are scored, go backward and AdamW takes its step; of the last of some steps.

    A pass returns its loss. `more` is what is held besides, such as a reference.
    """
    trained = [weight for weight in policy.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(trained)
    with LiveBytes() as live:
        live.watch(*policy.parameters(), *policy.buffers(), *more)
        for _ in range(steps):
            optimiser.zero_grad(set_to_none=True)
            live.peak = live.now
            for each in passes:
                each().backward()
            optimiser.step()
        return live.peak


def traced(act: Callable[[], object], *held: Tensor) -> int:
    """Highest number of bytes during `act`, with what is held besides."""
    with LiveBytes() as live, torch.no_grad():
        live.watch(*held)
        act()
        return live.peak
