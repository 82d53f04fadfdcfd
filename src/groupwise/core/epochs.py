"""Which conditions a step draws: an endless row of shuffled epochs, any place of it computable directly.

The shuffle is a keyed permutation (a Feistel network over two mixed-radix halves with cycle walking: Black and Rogaway,
"Ciphers with arbitrary finite domains", CT-RSA 2002), so no list of the dataset's size is ever made.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Int64
from torch import Tensor

from groupwise.core.randomness import random_bits

_ROUNDS = 12
_EPOCH_SALT = 0x65706F6368  # "epoch": keeps these numbers apart from those of the rollouts


def draw_conditions(seed: int, step: int, *, conditions: int, per_step: int) -> Int64[Tensor, " per_step"]:
    """The step's conditions, all different; over an epoch each condition comes exactly once.

    A step that begins in one epoch may end in the next. Where the new epoch's opening would repeat a condition of that
    step, it changes places with a later one of the same opening.
    """
    first = step * per_step
    places = torch.arange(first, first + per_step)
    epochs = places // conditions
    old, new = int(epochs[0]), int(epochs[-1])
    drawn = _epoch_order(seed, old, places[epochs == old] % conditions, conditions, per_step)
    if new == old:
        return drawn
    opening = _epoch_order(seed, new, places[epochs == new] % conditions, conditions, per_step)
    return torch.cat([drawn, opening])


def _epoch_order(seed: int, epoch: int, places: Tensor, conditions: int, per_step: int) -> Tensor:
    """Conditions at the given places of one epoch, after the exchange at its opening."""
    order = keyed_permutation(places, conditions, seed, epoch)
    carried = epoch * conditions % per_step  # rows of the straddling step that the epoch before has filled
    if carried and int(places[0]) < per_step:
        opening = _swap_repeats(seed, epoch, conditions, per_step, carried)
        early = places < per_step
        order[early] = opening[places[early]]
    return order


def _swap_repeats(seed: int, epoch: int, conditions: int, per_step: int, carried: int) -> Tensor:
    tail = torch.arange(conditions - carried, conditions)
    taken = keyed_permutation(tail, conditions, seed, epoch - 1)
    opening = keyed_permutation(torch.arange(per_step), conditions, seed, epoch)
    head = per_step - carried
    repeats = torch.isin(opening, taken)
    clashes = torch.nonzero(repeats[:head]).flatten()
    free = torch.nonzero(~repeats[head:]).flatten()[: len(clashes)] + head
    opening[clashes], opening[free] = opening[free].clone(), opening[clashes].clone()
    return opening


def keyed_permutation(places: Int64[Tensor, " n"], size: int, *keys: int) -> Int64[Tensor, " n"]:
    """Where a permutation of range(size), chosen by the keys, sends each place."""
    left_size = max(2, math.isqrt(size))
    right_size = -(-size // left_size)
    found = _feistel(places, left_size, right_size, keys)
    outside = found >= size
    while outside.any():
        found[outside] = _feistel(found[outside], left_size, right_size, keys)
        outside = found >= size
    return found


def _feistel(places: Tensor, left_size: int, right_size: int, keys: tuple[int, ...]) -> Tensor:
    left, right = places // right_size, places % right_size
    for turn in range(_ROUNDS):
        if turn % 2:
            left = (left + _noise(right, turn, keys)) % left_size
        else:
            right = (right + _noise(left, turn, keys)) % right_size
    return left * right_size + right


def _noise(half: Tensor, turn: int, keys: tuple[int, ...]) -> Tensor:
    """Non-negative 62-bit noise: modulo bias is below one in a billion for any dataset."""
    return random_bits(_EPOCH_SALT, *keys, turn, half) & 0x3FFFFFFFFFFFFFFF
