"""Rows in flight: prompts are prefilled as their rows enter, finished rows leave, waiting rows take their seats."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.workloads.chat.completion import Completion
from groupwise.workloads.chat.decoding import Decoding, OwnCache, PromptCache
from groupwise.workloads.chat.packed import KeysAndValues, pack
from groupwise.workloads.chat.policy import Policy
from groupwise.workloads.chat.sampling import Drawn, Sampling, draw

_PREFILL_TOKENS = 8192  # that go through the model together
_LOGITS = 1 << 24  # that are held together


@dataclass(frozen=True)
class _Step:
    """The tokens drawn together: of which rows, and the how-manieth of each."""

    rows: Tensor
    places: Tensor
    drawn: Drawn


class Flight:
    """All rows of a rollout; at most `seats` of them decode together."""

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        prompt_of_row: Sequence[int],
        chances: Tensor,
        sampling: Sampling,
        seats: int,
    ):
        self.policy, self.prompts, self.sampling, self.seats = policy, prompts, sampling, seats
        self.prompt_of_row, self.chances = prompt_of_row, chances.to(policy.device)
        self.head = policy.head.rounded()
        self.stops = torch.tensor(sampling.stop_ids, dtype=torch.int64, device=policy.device)
        self.waiting = deque(sorted(range(len(prompt_of_row)), key=prompt_of_row.__getitem__))
        self.rows: list[int] = []
        """The row on each seat."""
        self.last = torch.empty(0, dtype=torch.int64, device=policy.device)
        self.drawn = self.last
        """Tokens that each seat has drawn, and the last of them."""
        self.own, self.cached = OwnCache(min(seats, len(prompt_of_row)), sampling.max_new_tokens), PromptCache()
        self.after_prompt: dict[int, Tensor] = {}
        """The hidden state that predicts the first token, of each prompt in flight."""
        self.steps: list[_Step] = []
        self.layout: Decoding | None = None
        """Who sits where; None after somebody came or left."""
        self.lengths = self.numbers = self.last
        """Of each seat: the length of its prompt, and its row."""

    def run(self) -> list[Completion]:
        """Everything, in the rows' order."""
        while self.waiting or self.rows:
            while self.waiting and len(self.rows) < self.seats:
                self._admit()
            if self.rows:
                self._decode()
        return self._completions()

    def _admit(self) -> None:
        """Fill the free seats; a row that is done with its first token gives its seat up at once."""
        free = self.seats - len(self.rows)
        entering = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
        self._prefill(sorted({self.prompt_of_row[row] for row in entering} - {*self.cached.numbers}))
        hidden = torch.stack([self.after_prompt[self.prompt_of_row[row]] for row in entering])
        numbers = torch.tensor(entering, device=hidden.device)
        ids = self._draw(hidden, numbers, torch.zeros_like(numbers))
        self.layout = None
        self.rows = [*self.rows, *entering]
        self.last = torch.cat([self.last, ids])
        self.drawn = torch.cat([self.drawn, torch.ones_like(ids)])
        self._leave()

    def _prefill(self, numbers: Sequence[int]) -> None:
        entering = []
        for part in _cuts(numbers, [len(self.prompts[number]) for number in numbers], _PREFILL_TOKENS):
            kept: KeysAndValues = {}
            packed = pack([self.prompts[number] for number in part], [[]] * len(part), self.policy.device, kept)
            hidden = self.policy.hidden(packed.ids[None], packed.positions[None], packed)[0]
            for number, where in zip(part, packed.prompts, strict=True):
                own = {layer: (key[:, where], value[:, where]) for layer, (key, value) in kept.items()}
                entering.append((number, len(self.prompts[number]), own))
                self.after_prompt[number] = hidden[where.stop - 1].clone()
        if entering:
            self.cached.change(set(), entering)

    def _decode(self) -> None:
        """One more token for every row in flight."""
        if self.layout is None:
            prompt_of_seat = [self.prompt_of_row[row] for row in self.rows]
            self.lengths = torch.tensor(
                [len(self.prompts[number]) for number in prompt_of_seat], device=self.drawn.device
            )
            self.numbers = torch.tensor(self.rows, device=self.drawn.device)
            self.layout = Decoding(self.own, self.cached, prompt_of_seat, self.drawn.device)
        before = self.drawn - 1
        self.layout.place_tokens(before, self.cached.dtype)
        hidden = self.policy.hidden(self.last[:, None], (self.lengths + before)[:, None], self.layout)[:, 0]
        self.last = self._draw(hidden, self.numbers, self.drawn)
        self.drawn = self.drawn + 1
        self._leave()

    def _draw(self, hidden: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        chances = self.chances[rows, places]
        size = max(1, _LOGITS // len(self.head.weight))
        steps = []
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            drawn = draw(self.head.logits(hidden[part]), chances[part], self.sampling)
            steps.append(_Step(rows[part], places[part], drawn))
        self.steps += steps
        return torch.cat([step.drawn.ids for step in steps])

    def _leave(self) -> None:
        """Rows that are done give up their seats; the last rows move into them."""
        done = torch.isin(self.last, self.stops) | (self.drawn >= self.sampling.max_new_tokens)
        seats = done.nonzero().flatten().tolist()
        if not seats:
            return
        self.layout = None
        order, used = list(range(len(self.rows))), int(self.drawn.max())
        for seat in reversed(seats):
            mover = order.pop()
            if seat < len(order):
                self.own.move(mover, seat, used)
                order[seat] = mover
        left, kept = {self.prompt_of_row[self.rows[seat]] for seat in seats}, torch.tensor(order, dtype=torch.int64)
        self.rows = [self.rows[seat] for seat in order]
        self.last, self.drawn = self.last[kept.to(self.last.device)], self.drawn[kept.to(self.drawn.device)]
        needed = {self.prompt_of_row[row] for row in (*self.rows, *self.waiting)}
        if left - needed:
            self.cached.change(left - needed, [])
            for number in left - needed:
                self.after_prompt.pop(number)

    def _completions(self) -> list[Completion]:
        """Each row's tokens, put together from the steps."""
        rows, places = (torch.cat([getattr(step, name) for step in self.steps]).cpu() for name in ("rows", "places"))
        order = torch.argsort(rows * self.sampling.max_new_tokens + places)
        lengths = torch.bincount(rows, minlength=len(self.prompt_of_row)).tolist()

        def of_rows(name: str) -> Sequence[Tensor]:
            return torch.cat([getattr(step.drawn, name) for step in self.steps]).cpu()[order].split(lengths)

        kept = of_rows("kept") if self.sampling.truncates and self.sampling.temperature else [None] * len(lengths)
        columns = zip(of_rows("ids"), of_rows("logp"), of_rows("entropy"), kept, strict=True)
        return [
            Completion(
                tuple(ids.tolist()), logps.clone(), entropies.clone(), int(ids[-1]) in self.sampling.stop_ids, count
            )
            for ids, logps, entropies, count in columns
        ]


def _cuts(numbers: Sequence[int], sizes: Sequence[int], most: int) -> list[list[int]]:
    """Neighbours whose sizes add up to `most` or less; a larger one alone."""
    cuts: list[list[int]] = []
    total = 0
    for number, size in zip(numbers, sizes, strict=True):
        if not cuts or total + size > most:
            cuts.append([])
            total = 0
        cuts[-1].append(number)
        total += size
    return cuts
