"""Completions of prompts: prefill, decode and sample until the scheduler has no rows left.

A member's completion depends only on (weights, prompt, seed, step, group, member).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.core.errors import UserError, require
from groupwise.core.placement import RolloutRows
from groupwise.core.randomness import uniform
from groupwise.workloads.chat.config import PREFILL_TOKENS, SAMPLING_LOGITS, SamplingParams
from groupwise.workloads.chat.engine.attention import KVByLayer
from groupwise.workloads.chat.engine.kv_cache import DecodeLayout, PromptKV, PromptKVCache, RowKVCache
from groupwise.workloads.chat.engine.packing import TokenIds, pack_batch
from groupwise.workloads.chat.engine.plain import generate_plain
from groupwise.workloads.chat.engine.policy import LanguageModelPolicy
from groupwise.workloads.chat.engine.sampler import Completion, SampledTokens, sample_tokens
from groupwise.workloads.chat.engine.scheduler import Scheduler


def generate(
    policy: LanguageModelPolicy,
    prompts: Sequence[TokenIds],
    prompt_of_row: Sequence[int],
    rows: RolloutRows,
    sampling: SamplingParams,
    *,
    decode_rows: int | None = None,
) -> list[Completion]:
    """A completion for every row, in the order of the rows; row r completes prompts[prompt_of_row[r]].

    `decode_rows` limits how many rows run together, and so the memory of the cache. It does not change the result.
    """
    assert len(prompt_of_row) == len(rows), "a prompt for every row"
    require(decode_rows is None or decode_rows >= 1, "decode_rows", decode_rows, "1 or more, or None for all")
    check_prompts(policy, prompts, sampling)
    uniforms = token_uniforms(rows, sampling.max_new_tokens)
    max_slots = decode_rows or len(rows)
    if policy.shares_prefix:
        return GenerationLoop(policy, prompts, Scheduler(prompt_of_row, max_slots), uniforms, sampling).run()
    completions: list[Completion] = []
    for start in range(0, len(rows), max_slots):
        part = slice(start, start + max_slots)
        row_prompts = [prompts[prompt] for prompt in prompt_of_row[part]]
        completions += generate_plain(policy, row_prompts, uniforms[part], sampling)
    return completions


def token_uniforms(rows: RolloutRows, tokens: int) -> Float[Tensor, "rows tokens"]:
    """The random number in [0, 1) of every token that a row may sample, in float64."""
    return uniform(rows.seed, rows.step, rows.group[:, None], rows.member[:, None], torch.arange(tokens))


def check_prompts(policy: LanguageModelPolicy, prompts: Sequence[TokenIds], sampling: SamplingParams) -> None:
    """Refuse prompts that the model cannot complete; no prompt is cut."""
    vocabulary, max_positions = policy.causal_lm.config.vocab_size, policy.max_positions
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(
                f"Prompt {index} has no tokens: a completion needs at least one to follow. Remove the prompt."
            )
        if not (min(prompt) >= 0 and max(prompt) < vocabulary):
            raise UserError(
                f"Prompt {index} holds token {max(prompt)} and the model has a vocabulary of {vocabulary}: model and"
                " tokenizer do not belong together."
            )
        if max_positions is not None and len(prompt) + sampling.max_new_tokens > max_positions:
            raise UserError(
                f"Prompt {index} has {len(prompt)} tokens, and with sampling.max_new_tokens {sampling.max_new_tokens}"
                f" it is longer than the {max_positions} positions of the model. Shorten or drop the prompt, or lower"
                " sampling.max_new_tokens."
            )


@dataclass(frozen=True)
class SampledStep:
    """Tokens that were sampled together: their rows, and their positions within each completion."""

    row_indices: Tensor
    positions: Tensor
    tokens: SampledTokens


@dataclass
class _DecodeBatch:
    """The running rows as tensors. It is rebuilt when a row is admitted or finishes."""

    layout: DecodeLayout
    row_indices: Tensor
    num_generated: Tensor
    position_ids: Tensor
    """Of the last token of each row."""


class GenerationLoop:
    """All rows of a rollout on a model that shares prompts: the tensors that belong to a `Scheduler`'s slots.

    A prompt is prefilled when its first row is admitted, and dropped with its last one.
    """

    def __init__(
        self,
        policy: LanguageModelPolicy,
        prompts: Sequence[TokenIds],
        scheduler: Scheduler,
        uniforms: Float[Tensor, "rows tokens"],
        sampling: SamplingParams,
    ):
        self.policy, self.prompts, self.scheduler, self.sampling = policy, prompts, scheduler, sampling
        self.head, self.uniforms = policy.head.cast(), uniforms.to(policy.device)
        self.stop_tokens = frozenset(sampling.stop_token_ids)
        self.row_cache = RowKVCache(scheduler.max_slots, sampling.max_new_tokens, policy.device)
        self.prompt_cache = PromptKVCache()
        self.prompt_states: dict[int, Tensor] = {}
        """Hidden state of the last token of each prompt in use, from which first tokens are sampled."""
        self.last_tokens = torch.empty(0, dtype=torch.int64, device=policy.device)
        """The last token in each slot."""
        self.batch: _DecodeBatch | None = None
        self.steps: list[SampledStep] = []

    def run(self) -> list[Completion]:
        """Generate all completions, in the order of the rows."""
        with self.policy.sampling():
            while not self.scheduler.is_done:
                while self.scheduler.can_admit:
                    self._admit()
                if self.scheduler.running:
                    self._decode()
        return self._completions()

    def _admit(self) -> None:
        """Fill the free slots and sample the first token of the new rows, with which some may already finish."""
        admitted = self.scheduler.admit()
        self._prefill(sorted({sequence.prompt for sequence in admitted} - {*self.prompt_cache.prompts}))
        hidden = torch.stack([self.prompt_states[sequence.prompt] for sequence in admitted])
        row_indices = torch.tensor([sequence.row for sequence in admitted], device=hidden.device)
        tokens = self._sample(hidden, row_indices, torch.zeros_like(row_indices))
        for sequence in admitted:
            sequence.num_generated = 1
        self.last_tokens, self.batch = torch.cat([self.last_tokens, tokens]), None
        self._evict_finished()

    def _prefill(self, prompts: Sequence[int]) -> None:
        inserted = []
        for chunk in _prefill_chunks(prompts, [len(self.prompts[prompt]) for prompt in prompts], PREFILL_TOKENS):
            kv: KVByLayer = {}
            packed = pack_batch([self.prompts[prompt] for prompt in chunk], [[]] * len(chunk), self.policy.device, kv)
            hidden = self.policy.hidden(packed.ids[None], packed.position_ids[None], packed)
            for prompt, tokens, state in zip(chunk, packed.prompt_slices, hidden, strict=True):
                layers = {layer: (key[:, tokens], value[:, tokens]) for layer, (key, value) in kv.items()}
                inserted.append(PromptKV(prompt, len(self.prompts[prompt]), layers))
                self.prompt_states[prompt] = state.clone()
        if inserted:
            self.prompt_cache.update(set(), inserted)

    def _decode(self) -> None:
        """Generate one more token of every running row."""
        running = self.scheduler.running
        batch = self.batch = self.batch or self._rebuild_batch()
        batch.layout.set_positions([sequence.num_generated - 1 for sequence in running], self.prompt_cache.dtype)
        hidden = self.policy.hidden(self.last_tokens[:, None], batch.position_ids[:, None], batch.layout)
        self.last_tokens = self._sample(hidden, batch.row_indices, batch.num_generated)
        batch.position_ids, batch.num_generated = batch.position_ids + 1, batch.num_generated + 1
        for sequence in running:
            sequence.num_generated += 1
        self._evict_finished()

    def _rebuild_batch(self) -> _DecodeBatch:
        device, running = self.policy.device, self.scheduler.running
        lengths = torch.tensor([len(self.prompts[sequence.prompt]) for sequence in running], device=device)
        num_generated = torch.tensor([sequence.num_generated for sequence in running], device=device)
        return _DecodeBatch(
            DecodeLayout(self.row_cache, self.prompt_cache, [sequence.prompt for sequence in running], device),
            torch.tensor([sequence.row for sequence in running], device=device),
            num_generated,
            position_ids=lengths + num_generated - 1,
        )

    def _sample(self, hidden: Tensor, row_indices: Tensor, positions: Tensor) -> Tensor:
        """Sample one token a row, record the step, and return the token ids."""
        uniforms = self.uniforms[row_indices, positions]
        size = max(1, SAMPLING_LOGITS // len(self.head.weight))
        steps = []
        for start in range(0, len(row_indices), size):
            part = slice(start, start + size)
            tokens = sample_tokens(self.head.logits(hidden[part]), uniforms[part], self.sampling)
            steps.append(SampledStep(row_indices[part], positions[part], tokens))
        self.steps += steps
        return steps[0].tokens.ids if len(steps) == 1 else torch.cat([step.tokens.ids for step in steps])

    def _evict_finished(self) -> None:
        """Free the slots of rows that are done, and the cache of prompts that no row needs any more."""
        running, max_tokens = self.scheduler.running, self.sampling.max_new_tokens
        finished = [
            slot
            for slot, (token, sequence) in enumerate(zip(self.last_tokens.tolist(), running, strict=True))
            if token in self.stop_tokens or sequence.num_generated >= max_tokens
        ]
        if not finished:
            return
        longest = max(sequence.num_generated for sequence in running)
        evicted = self.scheduler.finish(finished)
        last_tokens = self.last_tokens[: len(self.scheduler.running)].clone()
        for source, target in evicted.moves:
            self.row_cache.move_slot(source, target, longest)
            last_tokens[target] = self.last_tokens[source]
        self.last_tokens, self.batch = last_tokens, None
        if evicted.freed_prompts:
            self.prompt_cache.update(evicted.freed_prompts, [])
            for prompt in evicted.freed_prompts:
                self.prompt_states.pop(prompt)

    def _completions(self) -> list[Completion]:
        """The tokens of all steps, sorted by row and position."""
        rows = torch.cat([step.row_indices for step in self.steps]).cpu()
        positions = torch.cat([step.positions for step in self.steps]).cpu()
        order = torch.argsort(rows * self.sampling.max_new_tokens + positions)
        lengths = torch.bincount(rows, minlength=self.scheduler.num_rows).tolist()
        tokens = SampledTokens.concatenate([step.tokens for step in self.steps])

        def by_row(column: Tensor) -> Sequence[Tensor]:
            return column.cpu()[order].split(lengths)

        candidates = [None] * len(lengths) if tokens.num_candidates is None else by_row(tokens.num_candidates)
        columns = zip(by_row(tokens.ids), by_row(tokens.logp), by_row(tokens.entropy), candidates, strict=True)
        return [
            Completion(tuple(ids.tolist()), logps.clone(), entropies.clone(), int(ids[-1]) in self.stop_tokens, counts)
            for ids, logps, entropies, counts in columns
        ]


def _prefill_chunks(prompts: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Consecutive prompts of at most `max_tokens` together; a longer prompt is a chunk alone."""
    chunks: list[list[int]] = []
    total = 0
    for prompt, length in zip(prompts, lengths, strict=True):
        if not chunks or total + length > max_tokens:
            chunks.append([])
            total = 0
        chunks[-1].append(prompt)
        total += length
    return chunks
