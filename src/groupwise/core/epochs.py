"""Which conditions a step draws: an endless sequence of shuffled epochs, of which any position is computed directly.

The shuffle is a keyed permutation (a Feistel network over two mixed-radix halves with cycle walking: Black and Rogaway,
"Ciphers with arbitrary finite domains", CT-RSA 2002), so no list of the dataset's size is needed.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Int64
from torch import Tensor

from groupwise.core.randomness import random_bits

_ROUNDS = 12
_EPOCH_SALT = 0x65706F6368  # "epoch": other random numbers than those of the rollouts


def draw_conditions(seed: int, step: int, *, conditions: int, per_step: int) -> Int64[Tensor, " per_step"]:
    """The step's conditions, all different; over an epoch each condition comes exactly once.

    A step that begins in one epoch may end in the next. Where the start of the new epoch would repeat a condition of
    that step, it is swapped with a later one of the same start.
    """
    first = step * per_step
    positions = torch.arange(first, first + per_step)
    epochs = positions // conditions
    old, new = int(epochs[0]), int(epochs[-1])
    epoch_end = _epoch_order(seed, old, positions[epochs == old] % conditions, conditions, per_step)
    if new == old:
        return epoch_end
    epoch_start = _epoch_order(seed, new, positions[epochs == new] % conditions, conditions, per_step)
    return torch.cat([epoch_end, epoch_start])


def _epoch_order(seed: int, epoch: int, positions: Tensor, conditions: int, per_step: int) -> Tensor:
    """Conditions at the given positions of one epoch, with repeats at its start swapped."""
    order = keyed_permutation(positions, conditions, seed, epoch)
    carried_over = epoch * conditions % per_step  # rows of the step across both epochs that the epoch before has filled
    if carried_over and int(positions[0]) < per_step:
        epoch_start = _swap_repeats(seed, epoch, conditions, per_step, carried_over)
        early = positions < per_step
        order[early] = epoch_start[positions[early]]
    return order


def _swap_repeats(seed: int, epoch: int, conditions: int, per_step: int, carried_over: int) -> Tensor:
    last_positions = torch.arange(conditions - carried_over, conditions)
    already_drawn = keyed_permutation(last_positions, conditions, seed, epoch - 1)
    epoch_start = keyed_permutation(torch.arange(per_step), conditions, seed, epoch)
    same_step = per_step - carried_over
    repeats = torch.isin(epoch_start, already_drawn)
    clashes = torch.nonzero(repeats[:same_step]).flatten()
    free = torch.nonzero(~repeats[same_step:]).flatten()[: len(clashes)] + same_step
    epoch_start[clashes], epoch_start[free] = epoch_start[free].clone(), epoch_start[clashes].clone()
    return epoch_start


def keyed_permutation(positions: Int64[Tensor, " n"], size: int, *keys: int) -> Int64[Tensor, " n"]:
    """The images of these positions under a permutation of range(size) that the keys determine."""
    left_size = max(2, math.isqrt(size))
    right_size = -(-size // left_size)
    images = _feistel(positions, left_size, right_size, keys)
    outside = images >= size
    while outside.any():
        images[outside] = _feistel(images[outside], left_size, right_size, keys)
        outside = images >= size
    return images


def _feistel(positions: Tensor, left_size: int, right_size: int, keys: tuple[int, ...]) -> Tensor:
    left, right = positions // right_size, positions % right_size
    for round_index in range(_ROUNDS):
        if round_index % 2:
            left = (left + _noise(right, round_index, keys)) % left_size
        else:
            right = (right + _noise(left, round_index, keys)) % right_size
    return left * right_size + right


def _noise(half: Tensor, round_index: int, keys: tuple[int, ...]) -> Tensor:
    """Non-negative 62-bit noise: modulo bias is below one in a billion for any dataset."""
    return random_bits(_EPOCH_SALT, *keys, round_index, half) & 0x3FFFFFFFFFFFFFFF
