"""Random numbers without a generator: each is a function of (seed, step, group, member, decision, element).

So a rollout's numbers do not depend on its rank, its batch or the order of execution. They are computed on the CPU in
64 bits, because devices differ in the last bit of a logarithm.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

RandomKey = int | Tensor


def uniform(
    seed: RandomKey,
    step: RandomKey,
    group: RandomKey,
    member: RandomKey,
    decision: RandomKey = 0,
    element: RandomKey = 0,
) -> Float[Tensor, "*batch"]:
    """Numbers in [0, 1), in float64; the keys broadcast against each other."""
    return to_uniform(random_bits(seed, step, group, member, decision, element))


def normal(
    seed: RandomKey,
    step: RandomKey,
    group: RandomKey,
    member: RandomKey,
    decision: RandomKey = 0,
    element: RandomKey = 0,
) -> Float[Tensor, "*batch"]:
    """Standard normal numbers, in float64, by the inverse of the normal distribution function."""
    return to_normal(random_bits(seed, step, group, member, decision, element))


def random_bits(*keys: RandomKey) -> Int64[Tensor, "*batch"]:
    """64 random bits for every combination of the (broadcast) keys; the order of the keys matters."""
    state: RandomKey = 0
    for position, key in enumerate(keys, start=1):
        value = key.to(device="cpu", dtype=torch.int64) if isinstance(key, Tensor) else key
        state = _mix(_wrap(state * _GOLDEN) + _mix(_wrap(value + _signed(position * _GOLDEN))))
    return state if isinstance(state, Tensor) else torch.tensor(state)


def to_uniform(bits: Int64[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """The upper 53 bits as a number in [0, 1)."""
    return (bits >> 11 & (1 << 53) - 1).to(torch.float64) * 2.0**-53


def to_normal(bits: Int64[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """The upper 52 bits as the middle of one of 2^52 equal slices of (0, 1), never 0 or 1; then the inverse."""
    middles = ((bits >> 12 & (1 << 52) - 1).to(torch.float64) + 0.5) * 2.0**-52
    return torch.special.ndtri(middles)


def _mix(x: RandomKey) -> RandomKey:
    """SplitMix64's finalizer, on an integer or a tensor of them."""
    x = _wrap((x ^ _shift_right(x, 30)) * _MIX_1)
    x = _wrap((x ^ _shift_right(x, 27)) * _MIX_2)
    return _wrap(x ^ _shift_right(x, 31))


def _shift_right(x: RandomKey, bits: int) -> RandomKey:
    """Logical shift: Python's and torch's fill with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _wrap(x: RandomKey) -> RandomKey:
    """Overflow to 64 bits: tensors do so anyway, Python's integers do not."""
    return x if isinstance(x, Tensor) else _signed(x)


def _signed(value: int) -> int:
    """The 64-bit two's complement of a Python integer of any size."""
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >= 1 << 63 else value


# Constants of SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
