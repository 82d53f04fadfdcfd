"""Attention kernels on the device: torch's fused ones by the dispatcher, and what happens when one is wrong.

CUDA's and XPU's operations cannot run here. Stand-ins with their schemas, their demands on arguments and their layout
of the log-sum-exp are registered for the emulated device, as read in torch's sources.
"""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from tiny.llama import llama
from torch.nn import functional

from accelerator import emulated
from accelerator.steps import small_recipe
from groupwise.dist.devices import move_module
from groupwise.training.preflight import preflight
from groupwise.training.setup import set_up
from groupwise.workloads.chat.config import PolicyConfig
from groupwise.workloads.chat.engine import packing
from groupwise.workloads.chat.engine.attention import FUSED_KERNELS
from groupwise.workloads.chat.engine.packing import AttentionShape, ByParts, choose_attention, disagreement, pack_batch
from groupwise.workloads.chat.engine.policy import make_policy

FUSED = {kernel.name: ByParts(kernel) for kernel in FUSED_KERNELS}
OVERRIDEABLE, FLASH, EFFICIENT = (FUSED[name].kernel.operation for name in ("overrideable", "flash", "efficient"))
HALF, EXACT = torch.bfloat16, torch.float32
aten = torch.ops.aten


def on_cpu(query, key, value, causal, scale, bias=None):
    tensors = [tensor.detach().cpu() for tensor in (query, key, value)]
    bias = bias if bias is None else bias.cpu()
    outputs = aten._scaled_dot_product_flash_attention_for_cpu(*tensors, 0.0, causal, attn_mask=bias, scale=scale)
    return [output.to(query.device) for output in outputs]


def backward_on_cpu(tensors, causal, scale, bias=None):
    """Of grad, query, key, value, output and log-sum-exp."""
    operation = aten._scaled_dot_product_flash_attention_for_cpu_backward
    bias = bias if bias is None else bias.cpu()
    grads = operation(*(tensor.cpu() for tensor in tensors), 0.0, causal, attn_mask=bias, scale=scale)
    return [grad.to(tensors[0].device) for grad in grads]


def by_name(operation, given, scale):
    """The arguments of a call by their names in the operation's schema."""
    arguments = getattr(aten, operation).default._schema.arguments
    values = {argument.name: argument.default_value for argument in arguments}
    return SimpleNamespace(**values | dict(zip(values, given, strict=False)) | {"scale": scale})


class Flash:
    """CUDA's: half precision, widths of a multiple of 8, fewer key heads than heads."""

    operation = FLASH

    @staticmethod
    def forward(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        if query.dtype not in (torch.bfloat16, torch.float16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        assert (dropout_p, return_debug_mask, query.shape[3] % 8) == (0, False, 0)
        out, lse = on_cpu(query, key, value, is_causal, scale)
        seed = torch.tensor([1, query.shape[2]], device=query.device)
        offset, mask = torch.tensor(key.shape[2], device=query.device), out.new_empty(0)
        return out, lse, None, None, query.shape[2], key.shape[2], seed, offset, mask

    @staticmethod
    def backward(*given, scale=None):
        call = by_name(f"{FLASH}_backward", given, scale)
        sizes = call.query.shape[2], call.key.shape[2]
        assert (call.cum_seq_q, call.cum_seq_k, call.max_q, call.max_k, call.dropout_p) == (None, None, *sizes, 0)
        assert call.philox_seed.tolist() == [1, sizes[0]]  # those of the forward, of the same part
        assert call.philox_offset.item() == sizes[1]
        assert call.logsumexp.shape == call.query.shape[:3]
        assert call.logsumexp.is_contiguous()
        assert call.logsumexp.dtype == torch.float32
        assert call.grad_out.shape[3] % 8 == call.out.shape[3] % 8 == 0
        tensors = call.grad_out, call.query, call.key, call.value, call.out, call.logsumexp
        return tuple(backward_on_cpu(tensors, call.is_causal, scale))


class Efficient:
    """CUDA's: also float32; as many key heads as heads, a log-sum-exp padded to a multiple of 32 with infinity."""

    operation = EFFICIENT

    @staticmethod
    def forward(query, key, value, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
        assert (bias, compute_log_sumexp, dropout_p, query.shape[3] % 8) == (None, True, 0, 0)
        assert query.shape[1] == key.shape[1] == value.shape[1]
        out, lse = on_cpu(query, key, value, is_causal, scale)
        lse = functional.pad(lse, (0, -lse.shape[2] % 32), value=math.inf)
        states = (torch.tensor(number, device=query.device) for number in query.shape[2:])
        return (out.transpose(1, 2).contiguous().transpose(1, 2), lse, *states)

    @staticmethod
    def backward(*given, scale=None):
        call = by_name(f"{EFFICIENT}_backward", given, scale)
        queries, lse = call.query.shape[2], call.logsumexp
        assert (call.attn_bias, call.dropout_p, list(call.grad_input_mask)) == (None, 0, [True, True, True, False])
        assert (call.philox_seed.item(), call.philox_offset.item()) == call.query.shape[2:]
        assert call.out.transpose(1, 2).is_contiguous()  # the kernel computes its strides
        assert lse.is_contiguous()
        assert lse.shape[2] == 32 * math.ceil(queries / 32)
        assert lse[..., queries:].isinf().all()
        tensors = call.grad_out_, call.query, call.key, call.value, call.out, lse[..., :queries]
        return (*backward_on_cpu(tensors, call.is_causal, scale), None)


class Xpu:
    """XPU's: a log-sum-exp [batch, heads, queries, 1], only for inputs that require a gradient; its backward takes
    as many key heads as heads.
    """

    operation = OVERRIDEABLE

    @staticmethod
    def forward(query, key, value, bias=None, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        assert not (bias is not None and is_causal)
        needs_lse = torch.is_grad_enabled() and query.requires_grad
        out, lse = on_cpu(query, key, value, is_causal, scale, bias)
        state = torch.zeros((), dtype=torch.long)
        sizes = query.shape[2], key.shape[2]
        return out, lse[..., None] if needs_lse else None, None, None, *sizes, state, state, None

    @staticmethod
    def backward(*given, scale=None):
        call = by_name(f"{OVERRIDEABLE}_backward", given, scale)
        if call.query.shape[1] != call.key.shape[1]:
            raise RuntimeError("number of heads in K/V must equal to number of heads in Q")
        assert call.logsumexp.shape == (*call.query.shape[:3], 1)
        tensors = call.grad_out, call.query, call.key, call.value, call.out, call.logsumexp[..., 0]
        return (*backward_on_cpu(tensors, call.is_causal, scale, call.attn_bias), None)


class WrongLogSumExp:
    """The log-sum-exp has another base."""

    operation = OVERRIDEABLE

    @staticmethod
    def forward(query, key, value, bias=None, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        out, lse = on_cpu(query, key, value, is_causal, scale, bias)
        return out, lse / math.log(2), None, None, query.shape[2], key.shape[2], None, None, None

    @staticmethod
    def backward(*given, scale=None):
        call = by_name(f"{OVERRIDEABLE}_backward", given, scale)
        tensors = call.grad_out, call.query, call.key, call.value, call.out, call.logsumexp
        return (*backward_on_cpu(tensors, call.is_causal, scale, call.attn_bias), None)


@pytest.fixture
def register(device):
    """Register stand-ins for the emulated device until the test ends."""
    if device.type != emulated.NAME:
        pytest.skip("a real device has kernels of its own")
    libraries = []

    def registered(stand_in) -> None:
        library = torch.library.Library("aten", "IMPL")
        libraries.append(library)
        with warnings.catch_warnings(action="ignore"):  # that another kernel is replaced
            for suffix in ("", "_backward"):
                function = getattr(stand_in, suffix.strip("_") or "forward")
                library.impl(f"{stand_in.operation}{suffix}", function, "PrivateUse1", allow_override=True)
        choose_attention.cache_clear()

    yield registered
    for library in libraries:
        library._destroy()
    choose_attention.cache_clear()


def shape_on(device, dtype=EXACT, heads=4, key_heads=2, width=12):
    return AttentionShape(device.type, dtype, heads, key_heads, width)


@pytest.mark.parametrize("dtype", [torch.float64, EXACT, HALF])
def test_the_device_has_a_fused_kernel_which_is_chosen_for_updates_and_decoding(device, counters, dtype):
    chosen = choose_attention(shape_on(device, dtype))
    assert (chosen.attend.name, chosen.kernel.name, chosen.reason) == ("overrideable", "overrideable", "")
    assert disagreement(FUSED["overrideable-plain"], shape_on(device, dtype)) is None
    assert not FUSED["flash"].kernel.is_on(device)


@pytest.mark.parametrize("dtype", [EXACT, HALF])
def test_a_kernel_that_the_device_has_may_refuse_but_not_differ(device, dtype):
    kernels = [way for way in FUSED.values() if way.kernel.is_on(device)]
    problems = {way.name: disagreement(way, shape_on(device, dtype, 8, 2, 64)) for way in kernels}
    assert not {name: problem for name, problem in problems.items() if problem and "differ" in problem}


@pytest.mark.parametrize("stand_in", [Flash, Efficient])
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(4, 2, 12), (4, 4, 16), (6, 1, 40)])
def test_cudas_operations_get_the_arguments_that_they_demand(device, register, stand_in, heads, key_heads, width):
    register(stand_in)
    name = stand_in.__name__.lower()
    assert FUSED[name].kernel.is_on(device)
    for dtype in (HALF, EXACT):
        problem = disagreement(FUSED[name], shape_on(device, dtype, heads, key_heads, width))
        assert (problem is None) == (stand_in is Efficient or dtype == HALF), problem
    assert stand_in is Efficient or "RuntimeError: FlashAttention only support" in problem


def test_xpus_operation_is_used_with_a_key_head_for_each_head(device, register):
    register(Xpu)
    assert choose_attention(shape_on(device, key_heads=4)).attend.name == "overrideable"
    chosen = choose_attention(shape_on(device, key_heads=2))
    assert chosen.attend.name == "overrideable-plain"
    assert chosen.reason.startswith("overrideable: RuntimeError: number of heads in K/V must equal")
    with torch.inference_mode():
        assert choose_attention(shape_on(device, key_heads=1)).attend.name == "overrideable-plain"


def test_a_wrong_log_sum_exp_is_noticed_and_said_at_the_start(device, register):
    register(WrongLogSumExp)
    setup = set_up(small_recipe("chat", device=device.type))
    checks = [check.detail for check in preflight(setup) if check.name == "note"]
    (detail,) = [line for detail in checks for line in detail.splitlines() if "attention by" in line]
    assert "attention by matrix products in float32 (overrideable: its outputs differ by" in detail
    register(Efficient)  # the next that the device has
    assert choose_attention(shape_on(device)).attend.name == "efficient"


@pytest.mark.parametrize("name", ["overrideable", "overrideable-plain", "products"])
def test_every_way_on_the_device_is_the_cpus_in_float64(device, counters, name):
    attend = FUSED.get(name, ByParts())
    generator, results = torch.Generator().manual_seed(4), []
    prompts, completions = [[1] * 9, [2] * 9, [3] * 13, [4]], [[[5] * 40, [6]], [[7] * 3], [[8] * 20, [9] * 17], [[]]]
    tokens = sum(map(len, prompts)) + sum(len(row) for group in completions for row in group)
    given = [torch.randn(1, heads, tokens, 10, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)]
    for where, way in ((torch.device("cpu"), FUSED["flash-cpu"]), (device, attend)):
        inputs = [tensor.to(where).requires_grad_() for tensor in given]
        out = way(inputs, pack_batch(prompts, completions, where), 0.3)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_preflight_names_the_kernel_that_the_layers_use(device, monkeypatch, dtype):
    policy = make_policy(move_module(llama(), device), PolicyConfig("tiny", dtype=dtype))
    used, packed = [], pack_batch([[1, 2]], [[[3]]], device)
    monkeypatch.setattr(packing, "choose_attention", lambda shape: used.append(shape) or choose_attention(shape))
    with policy.autocast():
        policy.hidden(packed.ids[None], packed.position_ids[None], packed)
    assert {*used} == {policy.attention_shape}
