"""Answers many (sample, knobs) together, and computes nothing twice.

A setting is a path: the top-k of every block in turn, 0 for a block that does not run. Two requests about the same
sample and tier share everything up to where their paths part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.workloads.controller.adapter import Adapter, Sample
from groupwise.workloads.controller.knobs import KnobOptions, Knobs, Work
from groupwise.workloads.controller.packed import NAME, Packing, Past, Tally, packed

Head = tuple[str, str]
"""A sample's name and a tier."""
Path = tuple[int, ...]
KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Request:
    sample: Sample
    knobs: Knobs

    @property
    def head(self) -> Head:
        return self.sample.name, self.knobs.tier


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    first_logits: Float[Tensor, " words"]
    """Scores of the first token."""


@dataclass(frozen=True)
class Prefix:
    """The blocks before the largest insertion position, run in full once per (sample, tier)."""

    latency_tokens: dict[Head, Float[Tensor, "positions width"]]
    """What the controller's second stage reads, one line for each insertion position."""
    states: dict[tuple[Head, Path], Tensor]
    keys_values: dict[tuple[Head, Path], KeysValues]
    work: Work


@dataclass
class _Run:
    """States by path at the block reached, keys and values by path at every block that ran."""

    states: dict[tuple[Head, Path], Tensor]
    keys_values: dict[tuple[Head, Path], KeysValues] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)


class Executor:
    """One model, its knobs, and no memory of earlier calls."""

    def __init__(self, adapter: Adapter, options: KnobOptions):
        self.adapter, self.options = adapter, options

    @torch.inference_mode()
    def prefix(self, heads: Sequence[tuple[Sample, str]], latency_token: Float[Tensor, " width"]) -> Prefix:
        """Run the first blocks with a latency token after each prompt.

        It comes last, so it attends to everything and nothing attends to it; its keys and values are dropped.
        """
        names = [(sample.name, tier) for sample, tier in heads]
        encoded, crops = self.adapter.encode(heads)
        full, known, tally = self.options.full_top_k, dict[tuple[Head, Path], Tensor](), Tally()
        keys_values: dict[tuple[Head, Path], KeysValues] = {}
        hidden = [torch.cat([prompt, latency_token[None].to(prompt)]) for prompt in encoded]
        seen: dict[Head, list[Tensor]] = {name: [] for name in names}
        known.update({(name, ()): prompt for name, prompt in zip(names, encoded, strict=True)})
        with self._installed():
            for block in range(max(self.options.insertion_positions)):
                hidden, pairs = self._run_block(block, hidden, [full] * len(hidden), tally)
                for name, states, (keys, values) in zip(names, hidden, pairs, strict=True):
                    path = (full,) * (block + 1)
                    known[name, path] = states[:-1]
                    keys_values[name, path] = keys[:, :-1], values[:, :-1]
                    seen[name].append(states[-1])
        tokens = {
            name: torch.stack([seen[name][position - 1] for position in self.options.insertion_positions])
            for name in names
        }
        return Prefix(tokens, known, keys_values, Work(crops, tally.block_rows, tally.expert_pairs))

    @torch.inference_mode()
    def answer(
        self,
        requests: Sequence[Request],
        *,
        prefix: Prefix | None = None,
        max_new_tokens: int = 1,
        stop_token: int | None = None,
    ) -> tuple[list[Answer], Work]:
        """Greedy answers in the order of the requests, and the work that was done for them."""
        for request in requests:
            self.options.check(request.knobs)
        paths = [self.options.path(request.knobs) for request in requests]
        run, crops = self._start(requests, prefix)
        with self._installed():
            self._run_paths(run, requests, paths)
            leaves = list(dict.fromkeys(zip((request.head for request in requests), paths, strict=True)))
            logits = self.adapter.logits(torch.stack([run.states[leaf][-1] for leaf in leaves]))
            tokens = [[int(row.argmax())] for row in logits]
            if max_new_tokens > 1:
                _Decoding(self, run, leaves, tokens, stop_token).run(max_new_tokens)
        answers = {
            leaf: Answer(tuple(row), scores) for leaf, row, scores in zip(leaves, tokens, logits, strict=True)
        }
        work = Work(crops, run.tally.block_rows, run.tally.expert_pairs)
        return [answers[request.head, path] for request, path in zip(requests, paths, strict=True)], work

    def _start(self, requests: Sequence[Request], prefix: Prefix | None) -> tuple[_Run, int]:
        """Embeddings of what is asked about, or what a prefix pass has left."""
        if prefix is not None:
            return _Run(dict(prefix.states), dict(prefix.keys_values)), 0
        heads = {request.head: (request.sample, request.knobs.tier) for request in requests}
        encoded, crops = self.adapter.encode(list(heads.values()))
        return _Run({(head, ()): prompt for head, prompt in zip(heads, encoded, strict=True)}), crops

    def _run_paths(self, run: _Run, requests: Sequence[Request], paths: Sequence[Path]) -> None:
        """Block after block, each distinct path once."""
        for block in range(self.options.total_blocks):
            wanted = dict.fromkeys((request.head, path[: block + 1]) for request, path in zip(requests, paths, strict=True))
            new = [node for node in wanted if node not in run.states]
            running = sorted((node for node in new if node[1][-1]), key=lambda node: len(run.states[node[0], ()]))
            for head, path in new:
                if not path[-1]:
                    run.states[head, path] = run.states[head, path[:-1]]
            if running:
                parents = [run.states[head, path[:-1]] for head, path in running]
                outputs, pairs = self._run_block(block, parents, [path[-1] for _, path in running], run.tally)
                run.states.update(zip(running, outputs, strict=True))
                run.keys_values.update(zip(running, pairs, strict=True))

    def _run_block(
        self, block: int, rows: Sequence[Tensor], top_ks: Sequence[int], tally: Tally
    ) -> tuple[list[Tensor], list[KeysValues]]:
        """One block on rows of any length, each with its own top-k."""
        lengths = tuple(len(row) for row in rows)
        top_k = torch.tensor(top_ks).repeat_interleave(torch.tensor(lengths))
        record = _Record()
        output = self._call(block, torch.cat(list(rows)), lengths, [0] * len(rows), Packing(lengths, top_k, tally), record)
        keys, values = record.keys[0].split(lengths, dim=1), record.values[0].split(lengths, dim=1)
        return list(output.split(lengths)), list(zip(keys, values, strict=True))

    def _call(
        self,
        block: int,
        hidden: Tensor,
        lengths: Sequence[int],
        starts: Sequence[int],
        packing: Packing,
        record: _Record | None,
    ) -> Tensor:
        packing.tally.block_rows += len(lengths)
        with packed(packing):
            output = self.adapter.blocks[block](
                hidden[None],
                position_embeddings=self.adapter.positions(lengths, starts),
                attention_mask=None,
                past_key_values=record,
            )
        return (output if isinstance(output, Tensor) else output[0])[0]

    @contextmanager
    def _installed(self) -> Iterator[None]:
        """The model's blocks use the packed attention and experts meanwhile, and their own again afterwards."""
        config = self.adapter.text_config
        before = config._attn_implementation, config._experts_implementation
        config._attn_implementation = config._experts_implementation = NAME
        try:
            yield
        finally:
            config._attn_implementation, config._experts_implementation = before


class _Record:
    """Takes the place of a cache: hands keys and values on as they are, and keeps them."""

    keys: Tensor
    values: Tensor

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self.keys, self.values = keys, values
        return keys, values


class _Decoding:
    """Token after token for rows whose paths differ; a row leaves when it is finished."""

    def __init__(
        self,
        executor: Executor,
        run: _Run,
        leaves: Sequence[tuple[Head, Path]],
        tokens: list[list[int]],
        stop_token: int | None,
    ):
        self.executor, self.run_, self.stop_token = executor, run, stop_token
        self.tokens = tokens
        self.paths = [path for _, path in leaves]
        self.lengths = [len(run.states[leaf]) for leaf in leaves]
        self.live = [row for row, own in enumerate(tokens) if own[-1] != stop_token]
        self.leaves = leaves

    def run(self, max_new_tokens: int) -> None:
        """n tokens need n - 1 steps: the first came from the prompt."""
        pasts, members = self._pasts(max_new_tokens - 1)
        for _ in range(max_new_tokens - 1):
            if not self.live:
                return
            hidden = self._step(pasts, members)
            chosen = self.executor.adapter.logits(hidden).argmax(-1).tolist()
            for row, token in zip(self.live, chosen, strict=True):
                self.tokens[row].append(token)
            self._let_go([row for row, token in zip(self.live, chosen, strict=True) if token == self.stop_token], pasts, members)

    def _pasts(self, room: int) -> tuple[dict[int, Past], dict[int, list[int]]]:
        """Keys and values of every block, for the rows that it runs on."""
        members = {
            block: [row for row in self.live if self.paths[row][block]]
            for block in range(self.executor.options.total_blocks)
        }
        members = {block: rows for block, rows in members.items() if rows}
        pasts = {
            block: Past(
                [self.run_.keys_values[self.leaves[row][0], self.paths[row][: block + 1]] for row in rows], room
            )
            for block, rows in members.items()
        }
        return pasts, members

    def _step(self, pasts: dict[int, Past], members: dict[int, list[int]]) -> Tensor:
        last = torch.tensor([self.tokens[row][-1] for row in self.live])
        hidden = self.executor.adapter.embed(last)
        place = {row: nth for nth, row in enumerate(self.live)}
        for block, rows in members.items():
            here = torch.tensor([place[row] for row in rows])
            ones = (1,) * len(rows)
            top_k = torch.tensor([self.paths[row][block] for row in rows])
            starts = [self.lengths[row] + len(self.tokens[row]) - 1 for row in rows]
            packing = Packing(ones, top_k, self.run_.tally, pasts[block])
            hidden[here] = self.executor._call(block, hidden[here], ones, starts, packing, None)
        return hidden

    def _let_go(self, finished: Sequence[int], pasts: dict[int, Past], members: dict[int, list[int]]) -> None:
        if not finished:
            return
        self.live = [row for row in self.live if row not in finished]
        for block in list(members):
            staying = [nth for nth, row in enumerate(members[block]) if row not in finished]
            if not staying:
                del members[block], pasts[block]
            elif len(staying) < len(members[block]):
                pasts[block].keep(staying)
                members[block] = [members[block][nth] for nth in staying]
