"""Which rows run, in which slot, and which wait. Integers only: the generation loop owns the model and the tensors."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Sequence:
    """A row on its way: which prompt it completes, and how many tokens it has so far."""

    row: int
    prompt: int
    num_generated: int = 0


@dataclass(frozen=True)
class Eviction:
    """What changes when sequences finish."""

    moves: list[tuple[int, int]]
    """(source slot, target slot): running sequences that fill the freed slots. No source is a target."""
    freed_prompts: set[int]
    """Prompts that no running or waiting sequence needs any more."""


class Scheduler:
    """Continuous batching: at most `max_slots` sequences run; a waiting one starts as soon as a slot is free.

    `running[slot]` is the sequence in a slot. Running sequences always fill the slots 0, 1, 2, ... without a gap.
    """

    def __init__(self, prompt_of_row: Iterable[int], max_slots: int):
        assert max_slots >= 1, "at least one slot"
        # Rows of one prompt start one after another, so that few prompts are in use at a time.
        sequences = [Sequence(row, prompt) for row, prompt in enumerate(prompt_of_row)]
        self.waiting = deque(sorted(sequences, key=lambda sequence: sequence.prompt))
        self.running: list[Sequence] = []
        self.num_rows, self.max_slots = len(sequences), min(max_slots, len(sequences))
        self._unfinished = Counter(sequence.prompt for sequence in sequences)

    @property
    def is_done(self) -> bool:
        return not self.waiting and not self.running

    @property
    def can_admit(self) -> bool:
        return bool(self.waiting) and len(self.running) < self.max_slots

    def admit(self) -> list[Sequence]:
        """Start waiting sequences in all free slots, after those that run; returns them."""
        free = self.max_slots - len(self.running)
        admitted = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
        self.running += admitted
        return admitted

    def finish(self, slots: Collection[int]) -> Eviction:
        """End the sequences in these slots; the last running sequences move into the freed slots."""
        finished = [self.running[slot].prompt for slot in slots]
        self._unfinished.subtract(finished)
        order = list(range(len(self.running)))
        for slot in sorted(slots, reverse=True):
            last = order.pop()
            if slot < len(order):
                order[slot] = last
        self.running = [self.running[slot] for slot in order]
        moves = [(source, target) for target, source in enumerate(order) if source != target]
        return Eviction(moves, {prompt for prompt in finished if not self._unfinished[prompt]})
