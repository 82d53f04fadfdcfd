"""Sharded weights, gradients and moments, with torch's FSDP2 (`fully_shard`).

Each rank holds a part of each tensor. A block's weights are gathered when it runs and freed after it, and its gradient
is summed into the rank that holds the part. In rollouts ranks may decode different numbers of tokens: all blocks are
gathered first, or each when a rank asks for it. All functions do nothing for a policy that is not sharded.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from groupwise.core.errors import UserError
from groupwise.dist.comm import Comm

P = ParamSpec("P")
T = TypeVar("T")

_CALL = "call_as_forward"
"""The method of a sharded module that FSDP gathers its weights for, besides `forward`."""

_WHOLE = "weights_are_whole"
"""The attribute of a sharded module that says whether `rollout_weights` has gathered its weights."""

_BLOCK_GATHERS = "block_gathers"
"""The attribute of a sharded policy whose rollouts gather block by block."""


def shard(  # noqa: PLR0913 - what a sharding is
    policy: nn.Module,
    blocks: Sequence[nn.Module],
    comm: Comm,
    *,
    frozen: Iterable[tuple[nn.Module, Sequence[nn.Module]]] = (),
    rollout: Literal["whole", "blocks"] = "whole",
    ranks_per_shard: int | None = None,
    compute_dtype: torch.dtype | None = None,
    load: Callable[[nn.Module], None] = lambda model: None,
) -> None:
    """Shard the policy in place, block by block; the rest of its weights are gathered together.

    `frozen`: models without gradients that are sharded too, each with its blocks. `rollout`: see `rollout_weights`.
    `ranks_per_shard`: so many ranks hold a whole copy together (those of a node), and gradients are summed between the
    copies. `compute_dtype`: weights are gathered in it and kept, like gradients and moments, in their own. `load` reads
    the parts of weights that are still in files, of the policy or a frozen model.
    """
    _refuse_scalars(policy)
    _refuse_different_weights(policy, comm)
    mesh = _mesh(comm, ranks_per_shard or comm.ranks)
    # Its gradient hooks are on the scores, outputs of the outermost call, which nobody changes in place.
    warnings.filterwarnings("ignore", f"FSDP2-wrapped module .FSDP{type(policy).__name__}. returned a view")
    gathers = _BlockGathers(comm)
    for model, parts in ((policy, blocks), *frozen):
        mixed = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=_gradient_dtype(model))
        for module in (*parts, model):
            fully_shard(module, mesh=mesh, mp_policy=mixed)
        load(model)
        for sharded in _sharded_modules(model):
            _configure(sharded, comm, gathers)
        call_block(model, lambda: None)  # FSDP takes the module that runs first for the root
        _set_reshard_after_forward(model, keep_root=model is policy)
        reshard(model)
        if rollout == "blocks":
            setattr(model, _BLOCK_GATHERS, gathers)


def _configure(module: Any, comm: Comm, gathers: _BlockGathers) -> None:
    """Sums in place of means, on each module: set on the model alone, gradients would be wrong."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    module.set_reduce_scatter_unused_params(True, recurse=False)
    module.set_custom_all_gather(_AgreedAllGather(gathers, gathers.add(module)))
    module.set_custom_reduce_scatter(_AgreedReduceScatter(comm))
    setattr(module, _WHOLE, False)
    setattr(module, _CALL, _call)
    register_fsdp_forward_method(module, _CALL)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers of the outermost module lists: what transformers and diffusers models repeat."""
    blocks: list[nn.Module] = []
    for child in model.children():
        layers = list(child) if isinstance(child, nn.ModuleList) else []
        blocks += [layer for layer in layers if any(True for _ in layer.parameters())] or blocks_of(child)
    return blocks


def ranks_per_node(comm: Comm) -> int:
    """Ranks that the launcher has started on each node; refuses other numbers on some of them, or one."""
    counts = comm.gather_objects([int(os.environ.get("LOCAL_WORLD_SIZE", comm.ranks))])
    if len(set(counts)) > 1 or comm.ranks % counts[0]:
        raise UserError(
            f"shard_over is 'node', and the nodes have {', '.join(map(str, sorted(set(counts))))} of {comm.ranks}"
            " ranks: each must have equally many to hold a copy. Launch all with the same --nproc-per-node, or take"
            " --shard-over all."
        )
    if counts[0] == 1:
        raise UserError(
            "shard_over is 'node', and each node has one rank, which would hold everything. Launch more with"
            " --nproc-per-node N, or take --shard-over all."
        )
    return counts[0]


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def rollout_mode(model: nn.Module) -> Literal["whole", "blocks"]:
    """How `rollout_weights` gathers a sharded policy."""
    return "blocks" if hasattr(model, _BLOCK_GATHERS) else "whole"


@contextmanager
def rollout_weights(model: nn.Module) -> Iterator[None]:
    """Within it each rank may run the model without gradients as often as it likes, or not at all.

    whole: all weights are gathered first, and nothing is sent. blocks: each block when it runs; a rank that leaves
    takes part in what others gather until all leave.
    """
    modules, gathers = _sharded_modules(model), getattr(model, _BLOCK_GATHERS, None)
    whole = modules if gathers is None else modules[:1]  # the root's weights are used outside of any forward, too
    try:
        for module in whole:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
            setattr(module, _WHOLE, True)
        if gathers is None:
            yield
        else:
            with gathers.on_request(modules[1:]):
                yield
    except BaseException:
        _reset(model)
        raise
    finally:
        for module in whole:
            setattr(module, _WHOLE, False)
        reshard(model)
        _set_reshard_after_forward(model, keep_root=any(weight.requires_grad for weight in model.parameters()))


@contextmanager
def passes_in_step(model: nn.Module) -> Iterator[None]:
    """For forward and backward passes, of which all ranks must run equally many. After an error none is half done."""
    try:
        yield
    except BaseException:
        _reset(model)
        raise
    finally:
        reshard(model)


def exchange_gradients(model: nn.Module, now: bool) -> None:
    """Whether the next backward pass sums its gradients over the ranks, or adds them to whole ones of this rank."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)


def call_block(module: nn.Module, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that uses the module's weights, as if it were the module's forward."""
    if not isinstance(module, FSDPModule) or getattr(module, _WHOLE):
        return function(*args, **kwargs)
    call: Callable[..., T] = getattr(module, _CALL)
    if not torch.is_grad_enabled():  # nothing to hook, and FSDP would copy arguments that a rollout writes its KV into
        return call(partial(function, *args, **kwargs))
    return call(function, *args, **kwargs)


def full(tensor: Tensor) -> Tensor:
    """The whole tensor of a sharded one, on each rank: a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_like(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor that all ranks have, placed as another one is."""
    if not isinstance(like, DTensor) or isinstance(whole, DTensor):
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


@contextmanager
@torch.no_grad()
def other_weights(model: nn.Module, others: dict[str, Tensor]) -> Iterator[None]:
    """Within it blocks of a sharded model gather other weights, by name; whole ones in `others` are cut to their parts.

    Also within a pass: a graph that was built on the model's own weights stays valid, because they are gathered again.
    """
    _set_reshard_after_forward(model, keep_root=False)  # or FSDP would keep the root's weights during a pass
    reshard(model)
    weights = {name: weight for name, weight in model.named_parameters() if name in others}
    others |= {name: part_like(others[name], weight) for name, weight in weights.items()}
    own = {name: weight.detach().clone() for name, weight in weights.items()}
    try:
        copy_weights(weights, others)
        _unshard_root(model)
        yield
    finally:
        reshard(model)
        copy_weights(weights, own)
        _set_reshard_after_forward(model, keep_root=True)
    _unshard_root(model)


@torch.no_grad()
def copy_weights(weights: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Give weights the values of the same name, sharded alike."""
    for name, weight in weights.items():
        weight.copy_(values[name])


def reshard(model: nn.Module) -> None:
    """Free whole weights, if any are gathered."""
    for module in _sharded_modules(model):
        module.reshard()


def _call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return function(*args, **kwargs)


def _unshard_root(model: nn.Module) -> None:
    """Weights outside of blocks, which a pass expects to be whole."""
    if isinstance(model, FSDPModule):
        model.unshard()


def _reset(model: nn.Module) -> None:
    """After an error in a forward or backward pass: as before it, without gradients of whole weights.

    torch's own reset leaves those that were not summed yet, and the next backward pass would add to them.
    """
    if isinstance(model, FSDPModule):
        model.reset_iter_state()
    for module in _sharded_modules(model):
        for group in _param_groups(module):
            for weight in group.fsdp_params:
                weight.unsharded_accumulated_grad = None
                if hasattr(weight, "_unsharded_param"):
                    weight._unsharded_param.grad = None


def _sharded_modules(model: nn.Module) -> list[Any]:
    """The model first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _set_reshard_after_forward(model: nn.Module, *, keep_root: bool) -> None:
    """Blocks are freed after their forward; the rest of a trained model is needed again at once."""
    for module in _sharded_modules(model):
        module.set_reshard_after_forward(not (keep_root and module is model), recurse=False)


def _mesh(comm: Comm, ranks_per_shard: int) -> DeviceMesh:
    if ranks_per_shard == comm.ranks:
        return init_device_mesh(comm.device.type, (comm.ranks,), mesh_dim_names=("shard",))
    shape = (comm.ranks // ranks_per_shard, ranks_per_shard)
    return init_device_mesh(comm.device.type, shape, mesh_dim_names=("replicate", "shard"))


def _gradient_dtype(model: nn.Module) -> torch.dtype | None:
    """Gradients are summed in the dtype of the trained weights."""
    return next((weight.dtype for weight in model.parameters() if weight.requires_grad), None)


def _refuse_scalars(policy: nn.Module) -> None:
    scalar = next((name for name, weight in policy.named_parameters() if not weight.ndim), None)
    if scalar is not None:
        raise UserError(
            f"shard is 'full' and the policy's weight '{scalar}' is a single number without an axis, which cannot be"
            " split. Give it shape (1,), or train without --shard."
        )


def _refuse_different_weights(policy: nn.Module, comm: Comm) -> None:
    """Each rank keeps its part of its own copy, so the copies must be equal."""
    weights = [weight.detach() for weight in policy.parameters() if not weight.is_meta]  # the others are in a file
    sums = [[weight.double().sum(), weight.abs().double().sum()] for weight in weights]
    all_sums = comm.gather(torch.tensor([sums], dtype=torch.float64))
    if not torch.equal(all_sums, all_sums[:1].expand_as(all_sums)):
        raise UserError(
            "shard is 'full' and the ranks have built policies with different weights, of which each would keep a part."
            " Make the policy from one seed or file on all ranks."
        )


class _BlockGathers:
    """Which block is gathered next where each rank may ask for another one, or for none.

    The least number that a rank asks for is gathered, by all ranks. So one that is behind catches up with the others,
    and from then on they gather for all of them at once.
    """

    def __init__(self, comm: Comm):
        self._comm, self._modules = comm, list[Any]()
        self._on_request = self._has_gathered = False

    def add(self, module: Any) -> int:
        """The number of this module."""
        self._modules.append(module)
        return len(self._modules) - 1

    @contextmanager
    def on_request(self, blocks: Sequence[Any]) -> Iterator[None]:
        """Within it blocks are gathered on request, and each asks for the next one before it computes."""
        self._gather_each_once(blocks)
        self._on_request = True
        try:
            for block, following in pairwise(blocks):
                block.set_modules_to_forward_prefetch([following])
            yield
            self._take_part_until(None, torch.empty(0, dtype=torch.uint8, device=self._comm.device))
            _finish_prefetches(blocks)
        finally:
            self._on_request = False
            for block in blocks:
                block.set_modules_to_forward_prefetch([])

    def _gather_each_once(self, blocks: Sequence[Any]) -> None:
        """The first time makes tensors that stay; made in a rollout's inference mode, they could not be trained."""
        for block in [] if self._has_gathered else blocks:
            block.unshard()
            block.reshard()
        self._has_gathered = True

    def wait_for_turn(self, number: int, output: Tensor) -> None:
        """Return when all ranks are about to gather this module into `output`; raise where one has failed."""
        if not self._on_request:
            self._comm.proceed()
        elif self._take_part_until(number, output.view(torch.uint8)):
            self._copy_part(number, output)  # which was the buffer of others

    def _take_part_until(self, number: int | None, buffer: Tensor) -> bool:
        """Gather what other ranks ask for until it is this module; None until nobody asks. Whether any was gathered.

        Once the ranks have agreed on a module, one that fails to allocate would leave the others waiting in its gather.
        So they also agree on who has the smallest buffer: if it is too small, they allocate first and ask again.
        """
        took_part = False
        while True:
            asked, least_room = self._comm.least_request(number, buffer.nbytes)
            if asked is not None and self._gathered_bytes(asked) > least_room:
                buffer = self._large_enough(buffer, asked)
                self._comm.proceed()
            if asked is None or asked == number:
                return took_part
            self._take_part(asked, buffer)
            took_part = True

    def _large_enough(self, buffer: Tensor, number: int) -> Tensor:
        size = self._gathered_bytes(number)
        if buffer.nbytes >= size:
            return buffer
        larger = buffer.new_empty(size)
        _try_copy(larger, self._group(number)._all_gather_process_group)
        return larger

    def _take_part(self, number: int, buffer: Tensor) -> None:
        """Send this rank's part to those who need it; here the block may be whole already, and nothing changes."""
        group = self._group(number)
        dtypes = {dtype for _, dtype in _parts_and_dtypes(group)}
        output = buffer[: self._gathered_bytes(number)].view(dtypes.pop() if len(dtypes) == 1 else torch.uint8)
        dist.all_gather_single(output, self._copy_part(number, output), group=group._all_gather_process_group)

    @torch.no_grad()
    def _copy_part(self, number: int, output: Tensor) -> Tensor:
        """This rank's part of the module, at its place in what is gathered. Allocates nothing."""
        group = self._group(number)
        ranks, parts = group._all_gather_process_group, _parts_and_dtypes(group)
        own = output.view(ranks.size(), -1)[ranks.rank()]
        sizes = [part.numel() * dtype.itemsize for part, dtype in parts]
        for place, (part, dtype) in zip(own.view(torch.uint8).split(sizes), parts, strict=True):
            if part.dtype == dtype:  # bytes, since weights of several dtypes may not be aligned
                place.copy_(part.view(torch.uint8))
            else:
                place.view(dtype).copy_(part)
        return own

    def _gathered_bytes(self, number: int) -> int:
        group = self._group(number)
        own = sum(part.numel() * dtype.itemsize for part, dtype in _parts_and_dtypes(group))
        return own * int(group._all_gather_process_group.size())

    def _group(self, number: int) -> Any:
        """What FSDP gathers of the module."""
        (group,) = _param_groups(self._modules[number])
        return group


def _parts_and_dtypes(group: Any) -> list[tuple[Tensor, torch.dtype]]:
    """This rank's part of each weight, and the dtype in which it is gathered."""
    weights = [(weight._sharded_param_data, weight.param_dtype) for weight in group.fsdp_params]
    return [(part, dtype or part.dtype) for part, dtype in weights]


def _finish_prefetches(blocks: Iterable[Any]) -> None:
    """A block that was asked for and did not run would else be taken for gathered when its weights have changed."""
    for group in (group for block in blocks for group in _param_groups(block)):
        group.wait_for_unshard()


def _param_groups(module: Any) -> list[Any]:
    groups: list[Any] = module._get_fsdp_state()._fsdp_param_groups
    return groups


class _Allocates:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AgreedAllGather(_Allocates):
    """An all-gather that all ranks enter together, and none when another one has failed: see `_BlockGathers`."""

    def __init__(self, gathers: _BlockGathers, number: int):
        self._gathers, self._number = gathers, number

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        _try_copy(output_tensor, group)
        self._gathers.wait_for_turn(self._number, output_tensor)
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class _AgreedReduceScatter(_Allocates):
    """A sum of gradients that no rank enters when another one has failed."""

    def __init__(self, comm: Comm):
        self._comm = comm

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        _try_copy(input_tensor, group)
        self._comm.proceed()
        return dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _try_copy(whole: Tensor, group: Any) -> None:
    """Raise where this rank has no memory for the copy that gloo makes; within a collective that would leave the
    others waiting. Backends of accelerators make none."""
    if group._get_backend(whole.device).name() == "gloo":
        # not from the heap of this thread: what is free in there is of no use to gloo's own threads
        mmap.mmap(-1, max(1, whole.nbytes)).close()
