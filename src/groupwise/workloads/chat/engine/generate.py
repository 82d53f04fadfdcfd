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
from groupwise.core.io.progress import advance
from groupwise.core.placement import RolloutRows
from groupwise.core.randomness import uniform
from groupwise.core.transfer import send, send_list
from groupwise.workloads.chat.config import PREFILL_TOKENS, SAMPLING_LOGITS, STOP_CHECK_STEPS, SamplingParams
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
        self.head = policy.head.cast()
        exact = torch.promote_types(self.head.dtype, torch.float32)
        self.uniforms = send(uniforms.to(exact), policy.device)
        self.stop_tokens = frozenset(sampling.stop_token_ids)
        self.row_cache = RowKVCache(scheduler.max_slots, sampling.max_new_tokens, policy.device)
        self.prompt_cache = PromptKVCache()
        self.prompt_states: dict[int, Tensor] = {}
        """Hidden state of the last token of each prompt in use, from which first tokens are sampled."""
        self.last_tokens = torch.empty(0, dtype=torch.int64, device=policy.device)
        """The last token in each slot."""
        self.batch: _DecodeBatch | None = None
        self.stop_check_steps = 1 if policy.device.type == "cpu" else STOP_CHECK_STEPS
        self.unchecked: list[Tensor] = []
        """Tokens in each slot since it was last looked which of them end a completion."""
        self.sampled: list[SampledTokens] = []
        self.sampled_rows: list[int] = []
        """The row of each token in `sampled`; its tokens are in order."""

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
        rows = [sequence.row for sequence in admitted]
        row_indices = send_list(rows, hidden.device)
        tokens = self._sample(hidden, rows, row_indices, torch.zeros_like(row_indices))
        for sequence in admitted:
            sequence.num_generated = 1
        self.last_tokens, self.batch = torch.cat([self.last_tokens, tokens]), None
        self.unchecked = [self.last_tokens]
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
        positions = [sequence.num_generated - 1 for sequence in running]
        batch.layout.set_positions(positions, batch.num_generated - 1, self.prompt_cache.dtype)
        hidden = self.policy.hidden(self.last_tokens[:, None], batch.position_ids[:, None], batch.layout)
        rows = [sequence.row for sequence in running]
        self.last_tokens = self._sample(hidden, rows, batch.row_indices, batch.num_generated)
        batch.position_ids, batch.num_generated = batch.position_ids + 1, batch.num_generated + 1
        for sequence in running:
            sequence.num_generated += 1
        advance()
        self.unchecked.append(self.last_tokens)
        longest = max(sequence.num_generated for sequence in running)
        if len(self.unchecked) >= self.stop_check_steps or longest >= self.sampling.max_new_tokens:
            self._evict_finished()

    def _rebuild_batch(self) -> _DecodeBatch:
        device, running = self.policy.device, self.scheduler.running
        lengths = [len(self.prompts[sequence.prompt]) for sequence in running]
        num_generated = [sequence.num_generated for sequence in running]
        return _DecodeBatch(
            DecodeLayout(self.row_cache, self.prompt_cache, [sequence.prompt for sequence in running], device),
            send_list([sequence.row for sequence in running], device),
            send_list(num_generated, device),
            position_ids=send_list(
                [length + count - 1 for length, count in zip(lengths, num_generated, strict=True)], device
            ),
        )

    def _sample(self, hidden: Tensor, rows: Sequence[int], row_indices: Tensor, positions: Tensor) -> Tensor:
        """Sample one token a row, record the step, and return the token ids."""
        uniforms = self.uniforms[row_indices, positions]
        size = max(1, SAMPLING_LOGITS // len(self.head.weight))
        steps = [
            sample_tokens(self.head.logits(hidden[start : start + size]), uniforms[start : start + size], self.sampling)
            for start in range(0, len(rows), size)
        ]
        self.sampled += steps
        self.sampled_rows += rows
        return steps[0].ids if len(steps) == 1 else torch.cat([tokens.ids for tokens in steps])

    def _evict_finished(self) -> None:
        """Free the slots of rows that are done, and the cache of prompts that no row needs any more.

        A row that ended since the last look has gone on: what it generated after its stop token is cut off later.
        """
        running, max_tokens = self.scheduler.running, self.sampling.max_new_tokens
        by_slot = torch.stack(self.unchecked, 1).tolist()
        self.unchecked = []
        finished = [
            slot
            for slot, (tokens, sequence) in enumerate(zip(by_slot, running, strict=True))
            if sequence.num_generated >= max_tokens or not self.stop_tokens.isdisjoint(tokens)
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
        """The tokens of all steps, sorted by row, up to the first stop token of each."""
        rows = torch.tensor(self.sampled_rows)
        order, lengths = rows.argsort(stable=True), torch.bincount(rows, minlength=self.scheduler.num_rows).tolist()
        tokens = SampledTokens.concatenate(self.sampled)
        has_counts = tokens.num_candidates is not None
        # Two copies to the host: of integers, and of numbers.
        integers = [tokens.ids, *([tokens.num_candidates] if tokens.num_candidates is not None else [])]
        by_row = [
            column[order].split(lengths)
            for column in (*torch.stack(integers).cpu(), *torch.stack((tokens.logp, tokens.entropy)).cpu())
        ]
        completions = []
        for ids, *counts, logps, entropies in zip(*by_row, strict=True):
            own = ids.tolist()
            stop = next((index for index, token in enumerate(own) if token in self.stop_tokens), None)
            end = len(own) if stop is None else stop + 1
            completions.append(
                Completion(
                    tuple(own[:end]),
                    logps[:end].clone(),
                    entropies[:end].clone(),
                    stop is not None,
                    counts[0][:end].clone() if has_counts else None,
                )
            )
        return completions


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
