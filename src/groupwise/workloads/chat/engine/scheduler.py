"""Rows in flight: prompts are prefilled as their rows enter, finished rows leave, waiting rows take their seats."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.workloads.chat.engine.kv_cache import DecodeLayout, PromptKVCache, RowKVCache
from groupwise.workloads.chat.engine.packing import KVByLayer, pack_batch
from groupwise.workloads.chat.engine.policy import LanguageModelPolicy
from groupwise.workloads.chat.engine.sampler import Completion, SampledTokens, SamplingParams, sample_tokens

PREFILL_TOKENS = 8192  # that go through the model together
SAMPLING_LOGITS = 1 << 24  # that are held together


@dataclass(frozen=True)
class SampledStep:
    """The tokens drawn together: of which rows, and the how-manieth of each."""

    rows: Tensor
    places: Tensor
    drawn: SampledTokens


class Flight:
    """All rows of a rollout; at most `seats` of them decode together."""

    def __init__(
        self,
        policy: LanguageModelPolicy,
        prompts: Sequence[Sequence[int]],
        prompt_of_row: Sequence[int],
        chances: Tensor,
        sampling: SamplingParams,
        seats: int,
    ):
        self.policy, self.prompts, self.sampling, self.seats = policy, prompts, sampling, seats
        self.prompt_of_row, self.chances = prompt_of_row, chances.to(policy.device)
        self.head, self.stops = policy.head, frozenset(sampling.stop_ids)
        self.waiting = deque(sorted(range(len(prompt_of_row)), key=prompt_of_row.__getitem__))
        self.rows: list[int] = []
        self.drawn: list[int] = []
        """Of each seat: its row, and how many tokens that has drawn. The device is asked for nothing but tokens."""
        self.last = torch.empty(0, dtype=torch.int64, device=policy.device)
        """The last token of each seat."""
        self.own = RowKVCache(min(seats, len(prompt_of_row)), sampling.max_new_tokens, policy.device)
        self.cached = PromptKVCache()
        self.after_prompt: dict[int, Tensor] = {}
        """The hidden state that predicts the first token, of each prompt in flight."""
        self.steps: list[SampledStep] = []
        self.layout: DecodeLayout | None = None
        """Who sits where; None after somebody came or left."""
        self.positions = self.places = self.numbers = self.last
        """On the device, of each seat: where its last token stands, which token it draws next, and its row."""

    def run(self) -> list[Completion]:
        """Everything, in the rows' order."""
        with self.policy.sampling():
            self.head = self.head.rounded()
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
        self.rows, self.drawn = [*self.rows, *entering], [*self.drawn, *[1] * len(entering)]
        self.last = torch.cat([self.last, ids])
        self._leave()

    def _prefill(self, numbers: Sequence[int]) -> None:
        entering = []
        for part in _prefill_chunks(numbers, [len(self.prompts[number]) for number in numbers], PREFILL_TOKENS):
            kept: KVByLayer = {}
            packed = pack_batch([self.prompts[number] for number in part], [[]] * len(part), self.policy.device, kept)
            hidden = self.policy.hidden(packed.ids[None], packed.positions[None], packed)
            for number, where, last in zip(part, packed.prompts, hidden, strict=True):
                own = {layer: (key[:, where], value[:, where]) for layer, (key, value) in kept.items()}
                entering.append((number, len(self.prompts[number]), own))
                self.after_prompt[number] = last.clone()
        if entering:
            self.cached.change(set(), entering)

    def _decode(self) -> None:
        """One more token for every row in flight."""
        layout = self.layout = self.layout or self._sit_down()
        layout.place_tokens([count - 1 for count in self.drawn], self.cached.dtype)
        hidden = self.policy.hidden(self.last[:, None], self.positions[:, None], layout)
        self.last = self._draw(hidden, self.numbers, self.places)
        self.positions, self.places = self.positions + 1, self.places + 1
        self.drawn = [count + 1 for count in self.drawn]
        self._leave()

    def _sit_down(self) -> DecodeLayout:
        """What is the same until somebody comes or leaves, and the counters that go on from here."""
        device, prompt_of_seat = self.policy.device, [self.prompt_of_row[row] for row in self.rows]
        lengths = torch.tensor([len(self.prompts[number]) for number in prompt_of_seat], device=device)
        self.numbers, self.places = torch.tensor(self.rows, device=device), torch.tensor(self.drawn, device=device)
        self.positions = lengths + self.places - 1
        return DecodeLayout(self.own, self.cached, prompt_of_seat, device)

    def _draw(self, hidden: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        chances = self.chances[rows, places]
        size = max(1, SAMPLING_LOGITS // len(self.head.weight))
        steps = []
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            drawn = sample_tokens(self.head.logits(hidden[part]), chances[part], self.sampling)
            steps.append(SampledStep(rows[part], places[part], drawn))
        self.steps += steps
        return steps[0].drawn.ids if len(steps) == 1 else torch.cat([step.drawn.ids for step in steps])

    def _leave(self) -> None:
        """Rows that are done give up their seats; the last rows move into them."""
        most = self.sampling.max_new_tokens
        last = zip(self.last.tolist(), self.drawn, strict=True)
        seats = [seat for seat, (token, count) in enumerate(last) if token in self.stops or count >= most]
        if not seats:
            return
        self.layout = None
        order, used = list(range(len(self.rows))), max(self.drawn)
        for seat in reversed(seats):
            mover = order.pop()
            if seat < len(order):
                self.own.move(mover, seat, used)
                order[seat] = mover
        left = {self.prompt_of_row[self.rows[seat]] for seat in seats}
        self.rows, self.drawn = [self.rows[seat] for seat in order], [self.drawn[seat] for seat in order]
        self.last = self.last[torch.tensor(order, dtype=torch.int64, device=self.last.device)]
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

        drawn = SampledTokens.joined([step.drawn for step in self.steps])

        def of_rows(column: Tensor) -> Sequence[Tensor]:
            return column.cpu()[order].split(lengths)

        kept = [None] * len(lengths) if drawn.kept is None else of_rows(drawn.kept)
        columns = zip(of_rows(drawn.ids), of_rows(drawn.logp), of_rows(drawn.entropy), kept, strict=True)
        return [
            Completion(
                tuple(ids.tolist()), logps.clone(), entropies.clone(), int(ids[-1]) in self.sampling.stop_ids, count
            )
            for ids, logps, entropies, count in columns
        ]


def _prefill_chunks(numbers: Sequence[int], sizes: Sequence[int], most: int) -> list[list[int]]:
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
