"""Keys and values during decoding: one copy of each prompt for its whole group, and the tokens that each row generated.

`DecodeLayout` attends over both.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from groupwise.core.transfer import send, send_list
from groupwise.workloads.chat.engine.attention import AttentionKernel, KVByLayer, Scoring, merge_by_lse
from groupwise.workloads.chat.engine.packing import AttentionShape, choose_attention

_INITIAL_CAPACITY = 32  # tokens of a row; doubled when they are full


class RowKVCache:
    """Keys and values of generated tokens, [slots, key heads, capacity, width] in each layer."""

    def __init__(self, slots: int, max_tokens: int, device: torch.device):
        self.slots, self.max_tokens = slots, max_tokens
        self.slot_index = torch.arange(slots, device=device)
        self.layers: KVByLayer = {}

    def append(
        self, layer: int, positions: Int64[Tensor, " rows"] | None, new: tuple[Tensor, Tensor], length: int
    ) -> tuple[Tensor, Tensor]:
        """Write one token a row, [rows, key heads, 1, width], at its position; None is the last of `length` positions.

        Returns the first `length` keys and values of the rows.
        """
        rows = new[0].shape[0]
        cached = []
        for cache, token in zip(self._grow(layer, new, length), new, strict=True):
            filled = cache[:rows, :, :length]
            if positions is None:
                filled.narrow(2, length - 1, 1).copy_(token)
            else:
                filled[self.slot_index[:rows], :, positions] = token[:, :, 0]
            cached.append(filled)
        return cached[0], cached[1]

    def move_slot(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a row to another slot."""
        for cached in self.layers.values():
            for cache in cached:
                cache[target, :, :length] = cache[source, :, :length]

    def _grow(self, layer: int, new: tuple[Tensor, Tensor], length: int) -> tuple[Tensor, Tensor]:
        """The layer's caches, with room for `length` tokens a row."""
        cached = self.layers.get(layer)
        if cached is not None and cached[0].shape[2] >= length:
            return cached
        capacity = min(self.max_tokens, max(_INITIAL_CAPACITY, 2 * length if cached else length))
        grown = []
        for index, token in enumerate(new):
            cache = token.new_zeros(self.slots, token.shape[1], capacity, token.shape[3])
            if cached is not None:
                cache[:, :, : cached[index].shape[2]] = cached[index]
            grown.append(cache)
        self.layers[layer] = (grown[0], grown[1])
        return self.layers[layer]


@dataclass(frozen=True)
class PromptKV:
    """Keys and values of one prompt, [key heads, length, width] in each layer."""

    prompt: int
    length: int
    layers: KVByLayer


class PromptKVCache:
    """Keys and values of the prompts in use, each once: [prompts, key heads, longest, width] in each layer."""

    def __init__(self) -> None:
        self.prompts: list[int] = []
        self.lengths: list[int] = []
        self.layers: KVByLayer = {}
        self.bias: Tensor | None = None
        """Hides the padding of shorter prompts; None where all are equally long."""

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.layers.values()))[0].dtype

    def update(self, evict: AbstractSet[int], insert: Sequence[PromptKV]) -> None:
        """Drop some prompts, add others, and stack what is left and what is new."""
        entries = [*(entry for entry in self._entries() if entry.prompt not in evict), *insert]
        self.prompts = [entry.prompt for entry in entries]
        self.lengths = [entry.length for entry in entries]
        self.layers = {
            layer: (
                _stack_padded([entry.layers[layer][0] for entry in entries]),
                _stack_padded([entry.layers[layer][1] for entry in entries]),
            )
            for layer in (entries[0].layers if entries else ())
        }
        self.bias = self._padding_bias()

    def _entries(self) -> list[PromptKV]:
        """The cached prompts as views, without padding."""
        entries = []
        for index, (prompt, length) in enumerate(zip(self.prompts, self.lengths, strict=True)):
            layers = {
                layer: (keys[index, :, :length], values[index, :, :length])
                for layer, (keys, values) in self.layers.items()
            }
            entries.append(PromptKV(prompt, length, layers))
        return entries

    def _padding_bias(self) -> Tensor | None:
        if len({*self.lengths}) <= 1:
            return None
        padding = torch.arange(max(self.lengths))[None] >= torch.tensor(self.lengths)[:, None]
        keys, _ = next(iter(self.layers.values()))
        bias = torch.zeros(padding.shape, dtype=keys.dtype).masked_fill_(padding, -torch.inf)
        return send(bias[:, None, None], keys.device)


def _stack_padded(tensors: Sequence[Tensor]) -> Tensor:
    """[key heads, length, width] of different lengths as one tensor, with zeros on the right."""
    longest = max(tensor.shape[1] for tensor in tensors)
    stacked = tensors[0].new_zeros(len(tensors), tensors[0].shape[0], longest, tensors[0].shape[2])
    for index, tensor in enumerate(tensors):
        stacked[index, :, : tensor.shape[1]] = tensor
    return stacked


class DecodeLayout:
    """The `AttentionLayout` of decoding steps, valid until a row is admitted or finishes: slots and their prompts."""

    logit_positions = None  # the token of every row

    def __init__(
        self, row_cache: RowKVCache, prompt_cache: PromptKVCache, prompt_of_slot: Sequence[int], device: torch.device
    ):
        self.row_cache, self.prompt_cache, self.device = row_cache, prompt_cache, device
        self.gather_index, self.scatter_index = _slots_by_prompt(prompt_cache.prompts, prompt_of_slot, device)
        self.length = 0
        self.positions: Tensor | None = None
        self.bias: Tensor | None = None

    def set_positions(self, positions: Sequence[int], on_device: Int64[Tensor, " rows"], dtype: torch.dtype) -> None:
        """Where the next token of each row goes in the row cache: after the tokens it has there.

        The same numbers as a list and on the device, so that none has to be sent.
        """
        self.length, self.positions, self.bias = max(positions) + 1, None, None
        if min(positions) == max(positions):
            return
        self.positions = on_device
        unused = torch.arange(self.length, device=self.device)[None] > self.positions[:, None]
        bias = torch.zeros(unused.shape, dtype=dtype, device=self.device)
        self.bias = bias.masked_fill_(unused, -torch.inf)[:, None, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """One query a row, [rows, heads, 1, width]: to its prompt and to its own tokens, merged."""
        rows, heads, _, width = query.shape
        folded = query.reshape(rows, key.shape[1], -1, width)  # heads that share a key head become its queries
        keys, values = self.row_cache.append(layer, self.positions, (key, value), self.length)
        kernel = choose_attention(AttentionShape.of(query, key)).kernel
        out, lse, _ = kernel.forward((folded, keys, values), Scoring(scale, bias=self.bias))
        return merge_by_lse(*self._attend_prompts(layer, folded, scale, kernel), out, lse).reshape(
            rows, 1, heads, width
        )

    def _attend_prompts(
        self, layer: int, folded: Tensor, scale: float, kernel: AttentionKernel
    ) -> tuple[Tensor, Tensor]:
        """The queries of a prompt's rows go together, so that its keys are read once for all of them."""
        key_heads, queries_per_key, width = folded.shape[1:]
        by_prompt = folded if self.gather_index is None else folded[self.gather_index]
        by_prompt = by_prompt.view(len(self.prompt_cache.prompts), -1, key_heads, queries_per_key, width)
        members = by_prompt.shape[1]
        query = by_prompt.transpose(1, 2).reshape(-1, key_heads, members * queries_per_key, width)
        keys, values = self.prompt_cache.layers[layer]
        out, lse, _ = kernel.forward((query, keys, values), Scoring(scale, bias=self.prompt_cache.bias))
        out = out.view(-1, key_heads, members, queries_per_key, width).transpose(1, 2)
        lse = lse.view(-1, key_heads, members, queries_per_key).transpose(1, 2)
        if self.scatter_index is None:
            return out.reshape(folded.shape), lse.reshape(folded.shape[:3])
        return out.flatten(0, 1)[self.scatter_index], lse.flatten(0, 1)[self.scatter_index]


def _slots_by_prompt(
    prompts: Sequence[int], prompt_of_slot: Sequence[int], device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Slots as a flattened table [prompts, most members], padded with a prompt's first slot; and where each slot is.

    None for both where the slots are in that order already.
    """
    slots: dict[int, list[int]] = {prompt: [] for prompt in prompts}
    for slot, prompt in enumerate(prompt_of_slot):
        slots[prompt].append(slot)
    members = max(map(len, slots.values()))
    table = [slot for line in slots.values() for slot in [*line, *[line[0]] * (members - len(line))]]
    if table == list(range(len(prompt_of_slot))):
        return None, None
    scatter_index = [0] * len(prompt_of_slot)
    for index, line in enumerate(slots.values()):
        for member, slot in enumerate(line):
            scatter_index[slot] = index * members + member
    return send_list(table, device), send_list(scatter_index, device)
