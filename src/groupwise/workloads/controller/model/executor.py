"""Answers many (sample, knobs) together, and computes nothing twice.

A setting is a path: the top-k of every block in turn, 0 for a block that does not run. Two requests about the same
sample and tier share everything up to where their paths part.
Token after token for rows whose depth and top-k differ; a row leaves when it is finished.
Latency tokens of many questions about one picture: the picture goes through the first blocks once.

The questions follow it side by side in one row, a tree: each sees the picture and itself, and none of the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.functional import pad

from groupwise.core.errors import UserError
from groupwise.workloads.controller.model.adapters import ModelAdapter, Prompt, Sample
from groupwise.workloads.controller.model.knobs import KnobOptions, Knobs, WorkCounts
from groupwise.workloads.controller.model.packing import BlockKVCache, BlockRunner, KeysValues, PackedRows, WorkCounter


@dataclass
class DecodingSequence:
    """One answer in the making."""

    path: tuple[int, ...]
    """The top-k of every block; 0 where it does not run."""
    first_place: int
    """The rotary position of its first token."""
    keys_values: Sequence[KeysValues | None]
    """What every block has kept of the prompt; None where it did not run."""
    tokens: list[int]
    """So far; the first came from the prompt itself."""

    @property
    def next_place(self) -> int:
        return self.first_place + len(self.tokens) - 1


@dataclass
class _Cache:
    """One block's rows, and their keys and values."""

    rows: list[DecodingSequence]
    past: BlockKVCache


def decode(
    blocks: BlockRunner,
    rows: Sequence[DecodingSequence],
    *,
    new_tokens: int,
    stop_token: int | None,
    tally: WorkCounter,
) -> None:
    """Append tokens to every row, up to `new_tokens` more or its stop token. n tokens in all take n - 1 steps."""
    live = [row for row in rows if row.tokens[-1] != stop_token]
    caches = _block_caches(live, new_tokens) if live and new_tokens else {}
    for _ in range(new_tokens):
        if not live:
            return
        hidden = _step(blocks, live, caches, tally)
        for row, token in zip(live, blocks.adapter.logits(hidden).argmax(-1).tolist(), strict=True):
            row.tokens.append(token)
        live = [row for row in live if row.tokens[-1] != stop_token]
        _drop_finished(caches, live)


def _block_caches(rows: Sequence[DecodingSequence], room: int) -> dict[int, _Cache]:
    """For every block that still has work, the rows it runs on."""
    caches = {}
    for block in range(len(rows[0].path)):
        here = [row for row in rows if row.path[block]]
        kept = [row.keys_values[block] for row in here]
        if here:
            caches[block] = _Cache(here, BlockKVCache([pair for pair in kept if pair is not None], room))
    return caches


def _step(
    blocks: BlockRunner, live: Sequence[DecodingSequence], caches: dict[int, _Cache], tally: WorkCounter
) -> Tensor:
    hidden = blocks.adapter.embed(torch.tensor([row.tokens[-1] for row in live]))
    place = {id(row): nth for nth, row in enumerate(live)}
    for block, cache in caches.items():
        here = torch.tensor([place[id(row)] for row in cache.rows])
        top_k = torch.tensor([row.path[block] for row in cache.rows])
        packing = PackedRows((1,) * len(cache.rows), top_k, tally, cache.past)
        hidden[here] = blocks.step(block, hidden[here], [row.next_place for row in cache.rows], packing)
    return hidden


def _drop_finished(caches: dict[int, _Cache], live: Sequence[DecodingSequence]) -> None:
    """Finished rows leave; a block without rows is not called any more."""
    staying_ids = {id(row) for row in live}
    for block, cache in list(caches.items()):
        staying = [nth for nth, row in enumerate(cache.rows) if id(row) in staying_ids]
        if not staying:
            del caches[block]
        elif len(staying) < len(cache.rows):
            cache.past.keep(staying)
            cache.rows = [cache.rows[nth] for nth in staying]


PromptKey = tuple[str, str]
"""A sample's name and a tier."""
BlockPath = tuple[int, ...]
TreeNode = tuple[PromptKey, BlockPath]
"""What has been computed: a head, and how its first blocks were run."""


@dataclass(frozen=True)
class AnswerRequest:
    sample: Sample
    knobs: Knobs

    @property
    def head(self) -> PromptKey:
        return self.sample.name, self.knobs.tier


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    first_logits: Float[Tensor, " words"]
    """Scores of the first token."""


@dataclass
class ComputedStates:
    """States and keys and values by node, and a count of what was run for them."""

    prompts: dict[PromptKey, Prompt]
    states: dict[TreeNode, Float[Tensor, "tokens width"]]
    keys_values: dict[TreeNode, KeysValues] = field(default_factory=dict)
    tally: WorkCounter = field(default_factory=WorkCounter)
    crops: int = 0
    patches: int = 0

    @property
    def work(self) -> WorkCounts:
        return WorkCounts(self.crops, self.tally.block_rows, self.tally.expert_pairs, self.patches)


@dataclass(frozen=True)
class PrefixStates:
    """The blocks before an insertion position, the largest or one that was asked for, run in full once per head."""

    latency_tokens: dict[PromptKey, Float[Tensor, "positions width"]]
    """What the controller's second stage reads, one line for each insertion position that was reached."""
    known: ComputedStates


def append_latency_token(
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

    def __init__(self, adapter: ModelAdapter, options: KnobOptions):
        self.adapter, self.options, self.blocks = adapter, options, BlockRunner(adapter)

    @torch.inference_mode()
    def prefix(
        self,
        heads: Sequence[tuple[Sample, str]],
        latency_token: Float[Tensor, " width"] | None = None,
        *,
        positions: Sequence[int] | None = None,
    ) -> PrefixStates:
        """Run the first blocks with a latency token after each prompt: see `append_latency_token`.

        It comes last, so it attends to everything and nothing attends to it; its keys and values are dropped. With
        `positions`, one a head, no block after a head's own position runs, and later positions have no latency token.
        """
        offered = self.options.insertion_positions
        known, names = self._encode(heads), [(sample.name, tier) for sample, tier in heads]
        last = dict(zip(names, positions or [max(offered)] * len(heads), strict=True))
        names.sort(key=lambda name: len(known.states[name, ()]))
        asked, path = {sample.name: len(sample.question) for sample, _ in heads}, self.options.path(self.options.full)
        rows = {
            name: append_latency_token(known.states[name, ()], asked[name[0]], latency_token=latency_token)
            for name in names
        }
        places = {name: _with_one_more(known.prompts[name]) for name in names}
        seen: dict[PromptKey, list[Tensor]] = {name: [] for name in names}
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
        return PrefixStates({name: torch.stack(tokens) for name, tokens in found.items()}, known)

    @torch.inference_mode()
    def answer(
        self,
        requests: Sequence[AnswerRequest],
        *,
        prefix: PrefixStates | None = None,
        max_new_tokens: int = 1,
        stop_token: int | None = None,
    ) -> tuple[list[Answer], WorkCounts]:
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

    def _encode(self, heads: Sequence[tuple[Sample, str]]) -> ComputedStates:
        encoded = self.adapter.encode(heads)
        prompts = {(sample.name, tier): prompt for (sample, tier), prompt in zip(heads, encoded.prompts, strict=True)}
        states: dict[TreeNode, Tensor] = {(head, ()): prompt.states for head, prompt in prompts.items()}
        return ComputedStates(prompts, states, crops=encoded.crops, patches=encoded.patches)

    def _start(self, requests: Sequence[AnswerRequest], prefix: PrefixStates | None) -> ComputedStates:
        """Embeddings of what is asked about, or what a prefix pass has left."""
        if prefix is not None:
            missing = {request.head for request in requests} - prefix.known.prompts.keys()
            if missing:
                raise UserError(
                    f"The prefix pass did not see {sorted(missing)}: give prefix() every (sample, tier) that is asked."
                )
            return ComputedStates(prefix.known.prompts, dict(prefix.known.states), dict(prefix.known.keys_values))
        return self._encode(list({r.head: (r.sample, r.knobs.tier) for r in requests}.values()))

    def _run(self, known: ComputedStates, leaves: Sequence[TreeNode], *, keep: bool) -> None:
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
        self, known: ComputedStates, block: int, running: Sequence[TreeNode], ending: Sequence[bool], *, keep: bool
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

    def _row(self, known: ComputedStates, leaf: TreeNode, first_token: int) -> DecodingSequence:
        head, path = leaf
        kept = [known.keys_values.get((head, path[: block + 1])) if k else None for block, k in enumerate(path)]
        return DecodingSequence(path, known.prompts[head].next_place, kept, [first_token])


def _with_one_more(prompt: Prompt) -> Int64[Tensor, "axes more"]:
    """The places of a prompt and of one token after it."""
    return torch.nn.functional.pad(prompt.places, (0, 1), value=prompt.next_place)


def image_key(sample: Sample) -> Hashable:
    """Samples with the same crops (the same object, not equal ones) and the same words before them share a picture."""
    return id(sample.crops), sample.before


@torch.inference_mode()
def latency_tokens_of_image(
    executor: Executor, samples: Sequence[Sample], latency_token: Float[Tensor, " width"] | None = None
) -> dict[PromptKey, Float[Tensor, "positions width"]]:
    """For samples that share a picture, at every tier, what `Executor.prefix` would find for each alone."""
    assert len({image_key(sample) for sample in samples}) == 1, "one picture at a time"
    tiers, offered = list(executor.options.crops), executor.options.insertion_positions
    prompts = executor.adapter.encode([(sample, tier) for tier in tiers for sample in samples]).prompts
    by_tier = [prompts[start : start + len(samples)] for start in range(0, len(prompts), len(samples))]
    questions = [len(sample.question) for sample in samples]
    shared = [len(each[0].states) - questions[0] for each in by_tier]
    states = [_states(each, start, latency_token) for each, start in zip(by_tier, shared, strict=True)]
    places = [_places(each, start) for each, start in zip(by_tier, shared, strict=True)]
    visible = [_branch_mask(start, questions).to(states[0].device) for start in shared]
    top_k, seen = [executor.options.full_top_k or 1] * len(tiers), list[list[Tensor]]()
    with executor.blocks.installed():
        for block in range(max(offered)):
            states, _ = executor.blocks.run(block, states, places, top_k, WorkCounter(), visible=visible)
            states = [each[0].after_block(block, state) for each, state in zip(by_tier, states, strict=True)]
            seen.append(states)
    ends = torch.tensor([length + 1 for length in questions]).cumsum(0) - 1
    return {
        (sample.name, tier): torch.stack([seen[position - 1][nth][start + ends[number]] for position in offered])
        for nth, (tier, start) in enumerate(zip(tiers, shared, strict=True))
        for number, sample in enumerate(samples)
    }


def _states(prompts: Sequence[Prompt], start: int, latency_token: Tensor | None) -> Float[Tensor, "tokens width"]:
    """The picture, then every question with a latency token behind it."""
    questions = [prompt.states[start:] for prompt in prompts]
    behind = [append_latency_token(question, len(question), latency_token=latency_token) for question in questions]
    return torch.cat([prompts[0].states[:start], *behind])


def _places(prompts: Sequence[Prompt], start: int) -> Int64[Tensor, "axes tokens"]:
    questions = [pad(prompt.places[:, start:], (0, 1), value=prompt.next_place) for prompt in prompts]
    return torch.cat([prompts[0].places[:, :start], *questions], dim=1)


def _branch_mask(start: int, questions: Sequence[int]) -> Bool[Tensor, "tokens tokens"]:
    """Who sees whom: what came before, of the picture and of one's own question."""
    branch = torch.tensor([0] * start + [nth for nth, length in enumerate(questions, 1) for _ in range(length + 1)])
    return ((branch == 0) | (branch == branch[:, None])).tril()
