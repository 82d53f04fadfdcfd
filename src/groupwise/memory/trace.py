"""Peak bytes of real code on fake tensors: every storage is counted while it lives, and none takes memory.

A workload describes its two stages as a TracedStep. Fake tensors live on the CPU: an autograd step on fake accelerator
tensors aborts a process that has no accelerator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from groupwise.memory.stages import StepSpec

_aten = torch.ops.aten


class LiveByteCounter(TorchDispatchMode):
    """Counts the bytes of all live tensors that operations made, and the peak.

    Operations whose result depends on values, which fake tensors do not have, get the result that takes most memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}

    def include(self, *tensors: Tensor) -> None:
        """Count these, too: tensors made before."""
        for tensor in tensors:
            self._count(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if args and isinstance(args[0], FakeTensor) and func in _VALUE_DEPENDENT_OPS:
            return self._count_result(_VALUE_DEPENDENT_OPS[func](*args, **(kwargs or {})))
        return self._count_result(func(*args, **(kwargs or {})))

    def _count_result(self, result: Any) -> Any:
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            size = storage.nbytes()
            self._live[key] = (weakref.ref(storage, lambda _: self._release(key)), size)
            self.current += size
            self.peak = max(self.peak, self.current)

    def _release(self, key: int) -> None:
        self.current -= self._live.pop(key)[1]


def _item(tensor: Tensor) -> float:
    return 0.0 if tensor.dtype.is_floating_point else 0


def _nonzero(tensor: Tensor) -> Tensor:
    return tensor.new_empty((tensor.numel(), tensor.ndim), dtype=torch.int64)


def _indexed(tensor: Tensor, indices: list[Tensor | None]) -> Tensor:
    """A fake mask selects everything; a real one selects by its values."""
    expanded = [
        _mask_indices(index) if index is not None and index.dtype == torch.bool else [index] for index in indices
    ]
    return _aten.index.Tensor(tensor, [index for part in expanded for index in part])


def _mask_indices(mask: Tensor) -> list[Tensor]:
    indices = _nonzero(mask) if isinstance(mask, FakeTensor) else mask.nonzero()
    return list(indices.unbind(1))


def _bincount(numbers: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    return numbers.new_empty(minlength, dtype=torch.int64)


def _grouped_mm(left: Tensor, right: Tensor, ends: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """An empty result of a grouped matrix product. Torch's own rule for fake tensors supports bfloat16 only."""
    if left.ndim == right.ndim == 2 and ends is not None:
        return left.new_empty((len(ends), left.shape[0], right.shape[1]))
    return left.new_empty((*left.shape[:-1], right.shape[-1]))


_VALUE_DEPENDENT_OPS: dict[Any, Callable[..., Any]] = {
    _aten._local_scalar_dense.default: _item,
    _aten.item.default: _item,
    _aten.nonzero.default: _nonzero,
    _aten.index.Tensor: _indexed,
    _aten.bincount.default: _bincount,
    _aten._grouped_mm.default: _grouped_mm,
}
"""Replacements of operations whose result depends on values."""


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """New tensors have shapes but no memory. They can be used outside the block, beside real ones."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def replace_with_fake(module: nn.Module, mode: FakeTensorMode) -> None:
    """Replace a module's real parameters and buffers, such as those of a new adapter, by fake ones."""
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            if not isinstance(weight.data, FakeTensor) and not isinstance(weight, FakeTensor):
                fake = nn.Parameter(mode.from_tensor(weight.data), requires_grad=weight.requires_grad)
                part._parameters[name] = fake
        for name, buffer in list(part.named_buffers(recurse=False)):
            if not isinstance(buffer, FakeTensor):
                part._buffers[name] = mode.from_tensor(buffer)


@dataclass(frozen=True)
class TracedStep:
    """One pass of each stage, on fake or real tensors, and what is held meanwhile."""

    policy: nn.Module
    update_pass: Callable[[], Tensor]
    """Returns the loss of the pass."""
    rollout: Callable[[], object] | None = None
    """None where rollouts cannot be traced."""
    held: tuple[Tensor, ...] = ()
    """Tensors besides the policy's: a frozen model, a reference, latents."""
    held_in_rollout: tuple[Tensor, ...] = ()
    held_in_update: tuple[Tensor, ...] = ()
    warm_up: Callable[[], object] | None = None
    """Fills the caches that an update finds filled by its rollouts."""

    @property
    def trained(self) -> list[nn.Parameter]:
        return [weight for weight in self.policy.parameters() if weight.requires_grad]


def trace_step(step: TracedStep, spec: StepSpec) -> dict[str, int]:
    """Peak bytes of each stage."""
    rollout = {"rollout": trace_rollout(step)} if step.rollout is not None else {}
    return {**rollout, "update": trace_update(step, spec)}


def trace_rollout(step: TracedStep) -> int:
    """Peak bytes of a rollout's pass, with AdamW's moments."""
    assert step.rollout is not None
    with fake_tensors():
        moments = [torch.empty_like(weight) for weight in step.trained for _ in range(2)]
    with LiveByteCounter() as live, torch.no_grad():
        live.include(*step.policy.parameters(), *step.policy.buffers(), *step.held, *step.held_in_rollout, *moments)
        step.rollout()
        return live.peak


def trace_update(step: TracedStep, spec: StepSpec) -> int:
    """Peak bytes of an update's last pass: forward, backward, and AdamW's step.

    Where other passes went before it, their gradient is there already, as AdamW's moments are: one pass is enough.
    """
    if step.warm_up is not None:
        with LiveByteCounter(), torch.no_grad():
            step.warm_up()
    optimizer = torch.optim.AdamW(step.trained, fused=spec.fused_optimizer, foreach=not spec.fused_optimizer)
    with LiveByteCounter() as live:
        live.include(*step.policy.parameters(), *step.policy.buffers(), *step.held, *step.held_in_update)
        for weight in step.trained:
            moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[weight] = {"step": torch.tensor(1.0), **moments}
            weight.grad = torch.zeros_like(weight) if spec.shape.passes > 1 else None
        step.update_pass().backward()
        optimizer.step()
        return live.peak
