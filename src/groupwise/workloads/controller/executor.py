"""Answers many (sample, knobs) together, and computes nothing twice.

A setting is a path: the top-k of every block in turn, 0 for a block that does not run. Two requests about the same
sample and tier share everything up to where their paths part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.workloads.controller.adapter import Adapter, Prompt, Sample
from groupwise.workloads.controller.blocks import Blocks, KeysValues
from groupwise.workloads.controller.decoding import Row, decode
from groupwise.workloads.controller.knobs import KnobOptions, Knobs, Work
from groupwise.workloads.controller.packed import Tally

Head = tuple[str, str]
"""A sample's name and a tier."""
Path = tuple[int, ...]
Node = tuple[Head, Path]
"""What has been computed: a head, and how its first blocks were run."""


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


@dataclass
class Known:
    """States and keys and values by node, and a count of what was run for them."""

    prompts: dict[Head, Prompt]
    states: dict[Node, Float[Tensor, "tokens width"]]
    keys_values: dict[Node, KeysValues] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    crops: int = 0
    patches: int = 0

    @property
    def work(self) -> Work:
        return Work(self.crops, self.tally.block_rows, self.tally.expert_pairs, self.patches)


@dataclass(frozen=True)
class Prefix:
    """The blocks before an insertion position, the largest or one that was asked for, run in full once per head."""

    latency_tokens: dict[Head, Float[Tensor, "positions width"]]
    """What the controller's second stage reads, one line for each insertion position that was reached."""
    known: Known


def with_latency_token(
    prompt: Float[Tensor, "tokens width"], question_tokens: int, *, latency_token: Float[Tensor, " width"] | None = None
) -> Float[Tensor, "more width"]:
    """A prompt, or its question alone, and a token behind it that starts as the given one.

    By default it starts as the mean of the question's embeddings, so that it knows what is asked even where it is read
    after a single block. One vector for all hardly did, and the second stage could not tell kinds of questions apart.
    """
    token = prompt[-question_tokens:].mean(0) if latency_token is None else latency_token.to(prompt)
    return torch.cat([prompt, token[None]])


class Executor:
    """One model, its knobs, and no memory of earlier calls."""

    def __init__(self, adapter: Adapter, options: KnobOptions):
        self.adapter, self.options, self.blocks = adapter, options, Blocks(adapter)

    @torch.inference_mode()
    def prefix(
        self,
        heads: Sequence[tuple[Sample, str]],
        latency_token: Float[Tensor, " width"] | None = None,
        *,
        positions: Sequence[int] | None = None,
    ) -> Prefix:
        """Run the first blocks with a latency token after each prompt: see `with_latency_token`.

        It comes last, so it attends to everything and nothing attends to it; its keys and values are dropped. With
        `positions`, one a head, no block after a head's own position runs, and later positions have no latency token.
        """
        offered = self.options.insertion_positions
        known, names = self._encode(heads), [(sample.name, tier) for sample, tier in heads]
        last = dict(zip(names, positions or [max(offered)] * len(heads), strict=True))
        names.sort(key=lambda name: len(known.states[name, ()]))
        asked, path = {sample.name: len(sample.question) for sample, _ in heads}, self.options.path(self.options.full)
        rows = {
            name: with_latency_token(known.states[name, ()], asked[name[0]], latency_token=latency_token)
            for name in names
        }
        places = {name: _with_one_more(known.prompts[name]) for name in names}
        seen: dict[Head, list[Tensor]] = {name: [] for name in names}
        with self.blocks.installed():
            for block in range(max(last.values())):
                running = [name for name in names if last[name] > block]
                states, pairs = self.blocks.run(
                    block,
                    [rows[name] for name in running],
                    [places[name] for name in running],
                    [path[block]] * len(running),
                    known.tally,
                )
                for name, state, (keys, values) in zip(running, states, pairs, strict=True):
                    node, rows[name] = (name, path[: block + 1]), known.prompts[name].after_block(block, state)
                    known.states[node], known.keys_values[node] = rows[name][:-1], (keys[:, :-1], values[:, :-1])
                    seen[name].append(rows[name][-1])
        found = {name: [seen[name][nth - 1] for nth in offered if nth <= last[name]] for name in names}
        return Prefix({name: torch.stack(tokens) for name, tokens in found.items()}, known)

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
        leaves = [(request.head, self.options.path(request.knobs)) for request in requests]
        distinct = list(dict.fromkeys(leaves))
        known = self._start(requests, prefix)
        with self.blocks.installed():
            self._run(known, distinct, keep=max_new_tokens > 1)
            logits = self.adapter.logits(torch.stack([known.states[leaf][-1] for leaf in distinct]))
            rows = [self._row(known, leaf, int(scores.argmax())) for leaf, scores in zip(distinct, logits, strict=True)]
            decode(self.blocks, rows, new_tokens=max_new_tokens - 1, stop_token=stop_token, tally=known.tally)
        found = {
            leaf: Answer(tuple(row.tokens), scores) for leaf, row, scores in zip(distinct, rows, logits, strict=True)
        }
        return [found[leaf] for leaf in leaves], known.work

    def _encode(self, heads: Sequence[tuple[Sample, str]]) -> Known:
        encoded = self.adapter.encode(heads)
        prompts = {(sample.name, tier): prompt for (sample, tier), prompt in zip(heads, encoded.prompts, strict=True)}
        states: dict[Node, Tensor] = {(head, ()): prompt.states for head, prompt in prompts.items()}
        return Known(prompts, states, crops=encoded.crops, patches=encoded.patches)

    def _start(self, requests: Sequence[Request], prefix: Prefix | None) -> Known:
        """Embeddings of what is asked about, or what a prefix pass has left."""
        if prefix is not None:
            missing = {request.head for request in requests} - prefix.known.prompts.keys()
            if missing:
                raise UserError(
                    f"The prefix pass did not see {sorted(missing)}: give prefix() every (sample, tier) that is asked."
                )
            return Known(prefix.known.prompts, dict(prefix.known.states), dict(prefix.known.keys_values))
        return self._encode(list({r.head: (r.sample, r.knobs.tier) for r in requests}.values()))

    def _run(self, known: Known, leaves: Sequence[Node], *, keep: bool) -> None:
        """Block after block, each distinct path once; rows of equal length stand together.

        States are let go when the next block has read them; keys and values are kept only for tokens to come.
        """
        for block in range(self.options.total_blocks):
            wanted = dict.fromkeys((head, path[: block + 1]) for head, path in leaves)
            new = [node for node in wanted if node not in known.states]
            for head, path in new:
                if not path[-1]:
                    known.states[head, path] = known.prompts[head].after_block(block, known.states[head, path[:-1]])
            running = sorted((node for node in new if node[1][-1]), key=lambda node: len(known.prompts[node[0]].states))
            if running:
                going_on = {(head, path[: block + 1]) for head, path in leaves if any(path[block + 1 :])}
                self._run_block(known, block, running, [node not in going_on for node in running], keep=keep)
            for node in {(head, path[:-1]) for head, path in wanted}:
                del known.states[node]

    def _run_block(
        self, known: Known, block: int, running: Sequence[Node], ending: Sequence[bool], *, keep: bool
    ) -> None:
        parents = [known.states[head, path[:-1]] for head, path in running]
        prompts = [known.prompts[head] for head, _ in running]
        places = [prompt.places for prompt in prompts]
        top_ks = [path[-1] for _, path in running]
        outputs, pairs = self.blocks.run(block, parents, places, top_ks, known.tally, ending)
        for node, prompt, states in zip(running, prompts, outputs, strict=True):
            known.states[node] = prompt.after_block(block, states)
        if keep:
            known.keys_values |= zip(running, pairs, strict=True)

    def _row(self, known: Known, leaf: Node, first_token: int) -> Row:
        head, path = leaf
        kept = [known.keys_values.get((head, path[: block + 1])) if k else None for block, k in enumerate(path)]
        return Row(path, known.prompts[head].next_place, kept, [first_token])


def _with_one_more(prompt: Prompt) -> Int64[Tensor, "axes more"]:
    """The places of a prompt and of one token after it."""
    return torch.nn.functional.pad(prompt.places, (0, 1), value=prompt.next_place)
