"""One token a row, against prompts that are stored once per group and the tokens that each row drew itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

from groupwise.workloads.chat.engine.attention import attend, merge_by_lse

_INITIAL_CAPACITY = 32  # of a row's own cache; doubled when they are full


class RowKVCache:
    """Keys and values of the tokens that rows drew, [seats, key heads, places, width] in each layer."""

    def __init__(self, seats: int, most_places: int, device: torch.device):
        self.seats, self.most_places = seats, most_places
        self.numbers = torch.arange(seats, device=device)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(
        self, layer: int, places: Int64[Tensor, " rows"] | None, new: tuple[Tensor, Tensor], used: int
    ) -> tuple[Tensor, Tensor]:
        """Put one token a row [rows, key heads, 1, width] in its place, the last of the used ones where None is given;
        returns all that the rows have so far.
        """
        rows = new[0].shape[0]
        found = []
        for cache, token in zip(self._with_places(layer, new, used), new, strict=True):
            seen = cache[:rows, :, :used]
            if places is None:
                seen.narrow(2, used - 1, 1).copy_(token)
            else:
                seen[self.numbers[:rows], :, places] = token[:, :, 0]
            found.append(seen)
        return found[0], found[1]

    def move(self, source: int, target: int, used: int) -> None:
        """A row changes its seat."""
        for stored in self.layers.values():
            for cache in stored:
                cache[target, :, :used] = cache[source, :, :used]

    def _with_places(self, layer: int, new: tuple[Tensor, Tensor], used: int) -> tuple[Tensor, Tensor]:
        stored = self.layers.get(layer)
        if stored is not None and stored[0].shape[2] >= used:
            return stored
        places = min(self.most_places, max(_INITIAL_CAPACITY, 2 * used if stored else used))
        grown = []
        for nth, each in enumerate(new):
            cache = each.new_zeros(self.seats, each.shape[1], places, each.shape[3])
            if stored is not None:
                cache[:, :, : stored[nth].shape[2]] = stored[nth]
            grown.append(cache)
        self.layers[layer] = (grown[0], grown[1])
        return self.layers[layer]


class PromptKVCache:
    """Keys and values of the prompts in flight, each once: [prompts, key heads, longest, width] in each layer."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.lengths: list[int] = []
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.bias: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.layers.values()))[0].dtype

    def change(self, leaving: set[int], entering: Sequence[tuple[int, int, dict[int, tuple[Tensor, Tensor]]]]) -> None:
        """Some prompts leave; others enter: (number, length, keys and values [key heads, length, width] by layer)."""
        old = [nth for nth, number in enumerate(self.numbers) if number not in leaving]
        layers = list(self.layers or entering[0][2]) if old or entering else []
        lengths = [self.lengths[nth] for nth in old] + [length for _, length, _ in entering]
        changed: dict[int, tuple[Tensor, Tensor]] = {}
        for layer in layers:
            pieces = [tuple(each[nth, :, : self.lengths[nth]] for each in self.layers[layer]) for nth in old]
            pieces += [new[layer] for _, _, new in entering]
            changed[layer] = (_stacked([piece[0] for piece in pieces]), _stacked([piece[1] for piece in pieces]))
        self.numbers = [self.numbers[nth] for nth in old] + [number for number, _, _ in entering]
        self.lengths, self.layers, self.bias = lengths, changed, None
        if lengths and min(lengths) < max(lengths):
            keys = changed[layers[0]][0]
            absent = torch.arange(max(lengths))[None] >= torch.tensor(lengths)[:, None]
            self.bias = torch.zeros(absent.shape).masked_fill(absent, -torch.inf)[:, None, None].to(keys)


def _stacked(pieces: Sequence[Tensor]) -> Tensor:
    longest = max(piece.shape[1] for piece in pieces)
    stacked = pieces[0].new_zeros(len(pieces), pieces[0].shape[0], longest, pieces[0].shape[2])
    for nth, piece in enumerate(pieces):
        stacked[nth, :, : piece.shape[1]] = piece
    return stacked


class DecodeLayout:
    """The layout of decoding steps while nobody comes or goes: who sits where, and which prompt each row follows."""

    predicting = None  # every row's token

    def __init__(self, own: RowKVCache, prompts: PromptKVCache, prompt_of_seat: Sequence[int], device: torch.device):
        self.own, self.prompts = own, prompts
        self.device = device
        self.table, self.back = _slots_by_prompt(prompts.numbers, prompt_of_seat, device)
        self.used = 0
        self.places: Tensor | None = None
        self.bias: Tensor | None = None

    def place_tokens(self, places: Sequence[int], dtype: torch.dtype) -> None:
        """Where each row's next token goes in its own cache: after the tokens it has there."""
        self.used, self.places, self.bias = max(places) + 1, None, None
        if min(places) == max(places):
            return
        self.places = torch.tensor(places, device=self.device)
        absent = torch.arange(self.used, device=self.device)[None] > self.places[:, None]
        self.bias = torch.zeros(absent.shape, dtype=dtype, device=self.device)
        self.bias = self.bias.masked_fill_(absent, -torch.inf)[:, None, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `attention.Layout`: [rows, heads, 1, width]."""
        rows, heads, _, width = query.shape
        folded = query.reshape(rows, key.shape[1], -1, width)  # heads that share keys become queries of one head
        keys, values = self.own.write(layer, self.places, (key, value), self.used)
        own = attend(folded, keys, values, scale=scale, bias=self.bias)
        return merge_by_lse(*self._attend_prompts(layer, folded, scale), *own).reshape(rows, 1, heads, width)

    def _attend_prompts(self, layer: int, folded: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The queries of a prompt's rows stand together, so its keys are read once for all of them."""
        key_heads, served, width = folded.shape[1:]
        by_prompt = folded if self.table is None else folded[self.table]
        by_prompt = by_prompt.view(len(self.prompts.numbers), -1, key_heads, served, width)
        members = by_prompt.shape[1]
        query = by_prompt.transpose(1, 2).reshape(-1, key_heads, members * served, width)
        out, lse = attend(query, *self.prompts.layers[layer], scale=scale, bias=self.prompts.bias)
        out = out.view(-1, key_heads, members, served, width).transpose(1, 2)
        lse = lse.view(-1, key_heads, members, served).transpose(1, 2)
        if self.back is None:
            return out.reshape(folded.shape), lse.reshape(folded.shape[:3])
        return out.flatten(0, 1)[self.back], lse.flatten(0, 1)[self.back]


def _slots_by_prompt(
    numbers: Sequence[int], prompt_of_seat: Sequence[int], device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Seats as a flat table [prompts, most members] (a shorter line repeats its first seat), and where each one is.

    None for both where the seats stand in that order already.
    """
    lines: dict[int, list[int]] = {number: [] for number in numbers}
    for seat, number in enumerate(prompt_of_seat):
        lines[number].append(seat)
    widest = max(map(len, lines.values()))
    table = [line + [line[0]] * (widest - len(line)) for line in lines.values()]
    if [seat for line in table for seat in line] == list(range(len(prompt_of_seat))):
        return None, None
    back = [0] * len(prompt_of_seat)
    for nth, line in enumerate(lines.values()):
        for place, seat in enumerate(line):
            back[seat] = nth * widest + place
    return torch.tensor(table, device=device).flatten(), torch.tensor(back, device=device)
