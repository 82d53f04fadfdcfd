"""Executor: answers many (sample, knobs) in shared passes, and computes nothing twice.

A configuration is a block path: the top-k of every block in turn, 0 for a block that does not run. Requests about the
same sample and tier share all blocks up to where their paths differ, so the work is a tree whose nodes run once.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.transfer import send
from groupwise.workloads.controller.model.adapters import ModelAdapter, Prompt, Sample
from groupwise.workloads.controller.model.knobs import KnobOptions, Knobs, WorkCounts
from groupwise.workloads.controller.model.packing import (
    AttentionMask,
    BlockKVCache,
    BlockRunner,
    KeysValues,
    PackedRows,
    WorkCounter,
    release_layouts,
    row_layout,
)

PromptKey = tuple[str, str]
"""A sample's name and a tier."""
BlockPath = tuple[int, ...]
TreeNode = tuple[PromptKey, BlockPath]
"""A prompt, and the path of its first blocks."""


@dataclass(frozen=True)
class AnswerRequest:
    sample: Sample
    knobs: Knobs

    @property
    def prompt_key(self) -> PromptKey:
        return self.sample.name, self.knobs.tier


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    first_logits: Float[Tensor, " words"]
    """Logits of the first token."""


@dataclass(frozen=True)
class EmbeddedText:
    """A sample's text, ready for the first block."""

    states: Float[Tensor, "tokens width"]
    """Of the tokens before the image, and of the question after it."""
    question_mean: Float[Tensor, " width"]
    """In float32 on the CPU."""


@dataclass(frozen=True)
class PrefixItem:
    """One row of a prefix pass: an image at one tier, and one or several questions about it."""

    samples: Sequence[Sample]
    """Several must share their image, see `image_key`. They follow it side by side, and each attends to the image and
    itself only."""
    tier: str
    until: int | None = None
    """The insertion position where this row stops; the largest one if None."""
    text: EmbeddedText | None = None
    """Of its only sample, if it is known already."""


@dataclass
class ComputedStates:
    """Hidden states, keys and values by tree node, and the work that was done for them."""

    prompts: dict[PromptKey, Prompt]
    states: dict[TreeNode, Float[Tensor, "tokens width"]]
    """Those of a prefix pass, and their keys and values, have a latency token after the prompt."""
    keys_values: dict[TreeNode, KeysValues] = field(default_factory=dict)
    counter: WorkCounter = field(default_factory=WorkCounter)


@dataclass(frozen=True)
class PrefixStates:
    """The blocks before the insertion positions, run in full."""

    latency_tokens: dict[PromptKey, dict[int, Float[Tensor, " width"]]]
    """The input of the controller's second stage, by insertion position."""
    computed: ComputedStates
    """Answers continue from these; those to samples that shared a row continue from the encoded prompt."""

    @staticmethod
    def merge(passes: Sequence[PrefixStates]) -> PrefixStates:
        """Several passes as one, for answers that continue from all of them."""
        merged = PrefixStates({}, ComputedStates({}, {}))
        for states in passes:
            merged.latency_tokens.update(states.latency_tokens)
            merged.computed.prompts.update(states.computed.prompts)
            merged.computed.states.update(states.computed.states)
            merged.computed.keys_values.update(states.computed.keys_values)
        return merged


class Executor:
    """One model and its knobs. Keeps nothing between calls."""

    def __init__(self, adapter: ModelAdapter, options: KnobOptions):
        self.adapter, self.options, self.blocks = adapter, options, BlockRunner(adapter)
        self._block_path = functools.cache(self._checked_block_path)
        self._full_path = options.block_path(options.full)

    @torch.inference_mode()
    def run_prefix(
        self,
        items: Sequence[PrefixItem],
        latency_token: Float[Tensor, " width"] | None = None,
        *,
        keep_keys_values: bool = True,
    ) -> PrefixStates:
        """Run the first blocks, in full, with a latency token after each question: see `_initial_latency_token`.

        It comes last, so it attends to everything and nothing attends to it. Keys and values are needed only where
        answers of several tokens continue from these states.
        """
        texts = {item.samples[0].name: item.text.states for item in items if item.text is not None}
        computed = self._encode([(sample, item.tier) for item in items for sample in item.samples], texts)
        positions, path = self.options.insertion_positions, self._full_path
        rows = [_PrefixRow(item, computed.prompts, item.until or max(positions), latency_token) for item in items]
        rows.sort(key=lambda row: len(row.states))
        tokens: dict[PromptKey, dict[int, Tensor]] = {key: {} for row in rows for key in row.keys}
        for block in range(max(row.until for row in rows)):
            running = [row for row in rows if row.until > block]
            states, keys_values = self.blocks.run(
                block,
                [row.states for row in running],
                [row.position_ids for row in running],
                row_layout(tuple([len(row.states) for row in running]), (path[block],) * len(running)),
                computed.counter,
                masks=None if all(row.mask is None for row in running) else [row.mask for row in running],
                keep_keys_values=keep_keys_values,
            )
            for index, (row, state) in enumerate(zip(running, states, strict=True)):
                row.states = row.prompt.add_deepstack(block, state)
                if row.mask is None:
                    node = row.keys[0], path[: block + 1]
                    computed.states[node] = row.states
                    if keep_keys_values:
                        computed.keys_values[node] = keys_values[index]
                if block + 1 in positions:
                    for key, token_index in zip(row.keys, row.token_indices, strict=True):
                        tokens[key][block + 1] = row.states[token_index]
        return PrefixStates(tokens, computed)

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
        targets = [(request.prompt_key, self._block_path(request.knobs)) for request in requests]
        distinct = list(dict.fromkeys(targets))
        computed = self._start(requests, prefix)
        last_states = self._run_tree(computed, distinct, keep_keys_values=max_new_tokens > 1)
        release_layouts()
        logits = self.adapter.logits(torch.cat([last_states[target] for target in distinct]))
        rows = [
            _decoding_sequence(computed, target, first_token)
            for target, first_token in zip(distinct, logits.argmax(-1).tolist(), strict=True)
        ]
        decode(self.blocks, rows, new_tokens=max_new_tokens - 1, stop_token=stop_token, counter=computed.counter)
        answers = {
            target: Answer(tuple(row.tokens), scores)
            for target, row, scores in zip(distinct, rows, logits, strict=True)
        }
        return [answers[target] for target in targets], computed.counter.counts

    def _checked_block_path(self, knobs: Knobs) -> BlockPath:
        self.options.check(knobs)
        return self.options.block_path(knobs)

    def _encode(
        self, inputs: Sequence[tuple[Sample, str]], texts: Mapping[str, Tensor] | None = None
    ) -> ComputedStates:
        encoded = self.adapter.encode(inputs, texts)
        prompts = {(sample.name, tier): prompt for (sample, tier), prompt in zip(inputs, encoded.prompts, strict=True)}
        states: dict[TreeNode, Tensor] = {(key, ()): prompt.states for key, prompt in prompts.items()}
        return ComputedStates(prompts, states, counter=WorkCounter(crops=encoded.crops, patches=encoded.patches))

    def _start(self, requests: Sequence[AnswerRequest], prefix: PrefixStates | None) -> ComputedStates:
        """Encoded prompts, or the states of a prefix pass."""
        if prefix is not None:
            computed = prefix.computed
            missing = {request.prompt_key for request in requests} - computed.prompts.keys()
            if missing:
                raise UserError(
                    f"The prefix pass does not contain {sorted(missing)}: give run_prefix() every (sample, tier) that"
                    " is to be answered."
                )
            return ComputedStates(computed.prompts, computed.states, dict(computed.keys_values))
        return self._encode(
            list({request.prompt_key: (request.sample, request.knobs.tier) for request in requests}.values())
        )

    def _run_tree(
        self, computed: ComputedStates, targets: Sequence[TreeNode], *, keep_keys_values: bool
    ) -> dict[TreeNode, Float[Tensor, "1 width"]]:
        """The last token's state after the last block of each target. Each distinct path runs once.

        Rows of equal length are adjacent. Keys and values are kept only for tokens to come.
        """
        paths: dict[PromptKey, list[BlockPath]] = {}
        for key, path in targets:
            paths.setdefault(key, []).append(path)
        branches = [_Branch(key, computed.prompts[key], own) for key, own in paths.items()]
        branches.sort(key=lambda branch: branch.tokens)
        for block in range(self.options.total_blocks):
            branches = [part for branch in branches for part in branch.split(block)]
            running = [branch for branch in branches if not branch.skip(block, computed.states)]
            if running:
                self._run_block(computed, block, running, keep_keys_values)
        return {(branch.key, branch.path): branch.prompt_states()[-1:] for branch in branches}

    def _run_block(
        self, computed: ComputedStates, block: int, running: Sequence[_Branch], keep_keys_values: bool
    ) -> None:
        layout = row_layout(
            tuple([branch.tokens for branch in running]),
            tuple([branch.path[block] for branch in running]),
            tuple([branch.last_block == block for branch in running]),
        )
        states, keys_values = self.blocks.run(
            block,
            [branch.prompt_states() for branch in running],
            [branch.prompt.position_ids for branch in running],
            layout,
            computed.counter,
            keep_keys_values=keep_keys_values,
        )
        for branch, state in zip(running, states, strict=True):
            branch.states = branch.prompt.add_deepstack(block, state)
        if keep_keys_values:
            nodes = [(branch.key, branch.path[: block + 1]) for branch in running]
            computed.keys_values |= zip(nodes, keys_values, strict=True)


class _Branch:
    """Paths of one prompt that have been equal so far, and the states that they share."""

    def __init__(
        self, key: PromptKey, prompt: Prompt, paths: Sequence[BlockPath], states: Float[Tensor, "_ width"] | None = None
    ):
        self.key, self.prompt, self.paths = key, prompt, paths
        self.tokens = len(prompt.states)
        self.states = prompt.states if states is None else states
        self.path = paths[0]
        """One of them: which one makes no difference up to the block that runs."""
        self.last_block = max(block for path in paths for block, top_k in enumerate(path) if top_k)

    def split(self, block: int) -> Sequence[_Branch]:
        """One branch for each top-k that a path has in this block."""
        if len(self.paths) == 1:
            return (self,)
        by_top_k: dict[int, list[BlockPath]] = {}
        for path in self.paths:
            by_top_k.setdefault(path[block], []).append(path)
        if len(by_top_k) == 1:
            return (self,)
        return [_Branch(self.key, self.prompt, paths, self.states) for paths in by_top_k.values()]

    def prompt_states(self) -> Float[Tensor, "tokens width"]:
        """Without the latency token that follows in the states of a prefix pass."""
        if len(self.states) > self.tokens:
            self.states = self.states[: self.tokens]
        return self.states

    def skip(self, block: int, known: Mapping[TreeNode, Tensor]) -> bool:
        """Whether the block need not run: a prefix pass has run it, or these paths drop it."""
        if (states := known.get((self.key, self.path[: block + 1]))) is not None:
            self.states = states
        elif not self.path[block]:
            self.states = self.prompt.add_deepstack(block, self.states)
        else:
            return False
        return True


def image_key(sample: Sample) -> Hashable:
    """Samples share an image if their crops are the same object (not just equal) and the tokens before it are equal."""
    return id(sample.crops_by_tier), sample.prefix_ids


class _PrefixRow:
    """The packed row of a PrefixItem: the image, then every question with its latency token."""

    def __init__(
        self,
        item: PrefixItem,
        prompts: dict[PromptKey, Prompt],
        until: int,
        latency_token: Float[Tensor, " width"] | None,
    ):
        assert len({image_key(sample) for sample in item.samples}) == 1, "the samples of an item share their image"
        assert item.text is None or len(item.samples) == 1, "a text belongs to a single sample"
        given = item.text.question_mean if latency_token is None and item.text is not None else latency_token
        self.until = until
        self.keys = [(sample.name, item.tier) for sample in item.samples]
        branches, lengths = [prompts[key] for key in self.keys], [len(sample.question_ids) for sample in item.samples]
        self.prompt = branches[0]
        shared = len(self.prompt.states) - lengths[0]
        states, position_ids = list[Tensor](), list[Tensor]()
        for branch in branches:
            question, first = branch.states[shared:], branch is self.prompt
            token = _initial_latency_token(question, given)[None]
            states += [branch.states if first else question, token]
            position_ids.append(branch.extended_position_ids if first else branch.extended_position_ids[:, shared:])
        self.states = torch.cat(states)
        self.position_ids = position_ids[0] if len(branches) == 1 else torch.cat(position_ids, dim=1)
        self.token_indices = [shared + end - 1 for end in accumulate(length + 1 for length in lengths)]
        self.mask = None if len(branches) == 1 else send(_branch_mask(shared, lengths), self.states.device)


def mean_embedding(embeddings: Float[Tensor, "tokens width"]) -> Float[Tensor, " width"]:
    """The mean of a question's embeddings, on the CPU; nothing is trained through it, so call it without gradients."""
    return embeddings.mean(0, dtype=torch.float32).cpu()


def _initial_latency_token(
    question: Float[Tensor, "tokens width"], latency_token: Float[Tensor, " width"] | None
) -> Float[Tensor, " width"]:
    """The latency token starts as the mean of its question's embeddings unless one is given.

    So it carries the question even where it is read after a single block. With one learned vector for all questions
    the second stage could not tell kinds of questions apart.
    """
    return question.mean(0) if latency_token is None else latency_token.to(question)


def _branch_mask(shared: int, lengths: Sequence[int]) -> AttentionMask:
    """Causal within the image and the token's own question."""
    branch = torch.tensor(
        [0] * shared + [index for index, length in enumerate(lengths, start=1) for _ in range(length + 1)]
    )
    return ((branch == 0) | (branch == branch[:, None])).tril()


@dataclass
class DecodingSequence:
    """One answer while it is decoded."""

    path: BlockPath
    first_position: int
    """The rotary position of its first token."""
    prompt_tokens: int
    keys_values: Sequence[KeysValues | None]
    """Keys and values by block, of the prompt and perhaps a latency token after it; None where a block did not run."""
    tokens: list[int]
    """So far; the first one comes from the prompt's logits."""

    @property
    def next_position(self) -> int:
        return self.first_position + len(self.tokens) - 1

    def prompt_keys_values(self, block: int) -> KeysValues:
        """Those of the prompt's tokens only."""
        keys_values = self.keys_values[block]
        assert keys_values is not None, "the block did not run"
        keys, values = keys_values
        return keys[:, : self.prompt_tokens], values[:, : self.prompt_tokens]


def _decoding_sequence(computed: ComputedStates, target: TreeNode, first_token: int) -> DecodingSequence:
    key, path = target
    prompt = computed.prompts[key]
    kept = [computed.keys_values.get((key, path[: block + 1])) if top_k else None for block, top_k in enumerate(path)]
    return DecodingSequence(path, prompt.next_position, len(prompt.states), kept, [first_token])


@dataclass
class _BlockCache:
    """The sequences that run one block, and their keys and values."""

    sequences: list[DecodingSequence]
    past: BlockKVCache


def decode(
    blocks: BlockRunner,
    sequences: Sequence[DecodingSequence],
    *,
    new_tokens: int,
    stop_token: int | None,
    counter: WorkCounter,
) -> None:
    """Append up to `new_tokens` tokens to every sequence, until its stop token. Depth and top-k may differ."""
    live = [sequence for sequence in sequences if sequence.tokens[-1] != stop_token]
    caches = _block_caches(live, new_tokens) if live and new_tokens else {}
    for _ in range(new_tokens):
        if not live:
            return
        hidden = _decode_step(blocks, live, caches, counter)
        for sequence, token in zip(live, blocks.adapter.logits(hidden).argmax(-1).tolist(), strict=True):
            sequence.tokens.append(token)
        live = [sequence for sequence in live if sequence.tokens[-1] != stop_token]
        _drop_finished(caches, live)


def _block_caches(sequences: Sequence[DecodingSequence], room: int) -> dict[int, _BlockCache]:
    """For every block that some sequence runs."""
    caches = {}
    for block in range(len(sequences[0].path)):
        running = [sequence for sequence in sequences if sequence.path[block]]
        if running:
            rows = [sequence.prompt_keys_values(block) for sequence in running]
            caches[block] = _BlockCache(running, BlockKVCache(rows, room))
    return caches


def _decode_step(
    blocks: BlockRunner, live: Sequence[DecodingSequence], caches: dict[int, _BlockCache], counter: WorkCounter
) -> Tensor:
    hidden = blocks.adapter.embed(torch.tensor([sequence.tokens[-1] for sequence in live]))
    row_of = {id(sequence): row for row, sequence in enumerate(live)}
    for block, cache in caches.items():
        rows = torch.tensor([row_of[id(sequence)] for sequence in cache.sequences])
        layout = row_layout((1,) * len(cache.sequences), tuple(sequence.path[block] for sequence in cache.sequences))
        packing = PackedRows(layout, counter, cache.past)
        positions = [sequence.next_position for sequence in cache.sequences]
        hidden[rows] = blocks.step(block, hidden[rows], positions, packing)
    return hidden


def _drop_finished(caches: dict[int, _BlockCache], live: Iterable[DecodingSequence]) -> None:
    """Remove finished sequences, and blocks that no sequence runs any more."""
    live_ids = {id(sequence) for sequence in live}
    for block, cache in list(caches.items()):
        staying = [row for row, sequence in enumerate(cache.sequences) if id(sequence) in live_ids]
        if not staying:
            del caches[block]
        elif len(staying) < len(cache.sequences):
            cache.past.select(staying)
            cache.sequences = [cache.sequences[row] for row in staying]
