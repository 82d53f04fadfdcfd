"""`generate` and `score` by transformers' own forward: every row computes its whole prompt. Slow, but for any model.

The fallback for models that cannot share prompts, and the reference that the shared-prefix path is tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from groupwise.core.transfer import send, send_list
from groupwise.workloads.chat.config import STOP_CHECK_STEPS, SamplingParams
from groupwise.workloads.chat.engine.packing import TokenIds
from groupwise.workloads.chat.engine.policy import LanguageModelPolicy
from groupwise.workloads.chat.engine.sampler import (
    MASKED_LOGIT,
    Completion,
    SampledTokens,
    candidate_counts,
    mask_to_candidates,
    sample_tokens,
    scale_logits,
)


def generate_plain(
    policy: LanguageModelPolicy, prompts: Sequence[TokenIds], uniforms: Tensor, sampling: SamplingParams
) -> list[Completion]:
    """A completion for every row: all rows together where the model gives the same after padding, else rows whose
    prompts are equally long.
    """
    rows_of_length: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of_length.setdefault(len(prompt), []).append(row)
    batches = list(rows_of_length.values())
    if len(batches) > 1 and _ignores_padding(policy):
        batches = [list(range(len(prompts)))]
    completions: dict[int, Completion] = {}
    for rows in batches:
        generated = _generate_batch(policy, [prompts[row] for row in rows], uniforms[rows], sampling)
        completions |= dict(zip(rows, generated, strict=True))
    return [completions[row] for row in range(len(prompts))]


@dataclass(frozen=True)
class _PaddedPrompts:
    """Prompts of one batch, padded on the left."""

    ids: Int64[Tensor, "rows longest"]
    mask: Int64[Tensor, "rows longest"]
    """1 for tokens, 0 for padding."""
    has_padding: bool

    @staticmethod
    def of(prompts: Sequence[TokenIds], device: torch.device) -> _PaddedPrompts:
        longest = max(map(len, prompts))
        ids = [[*[prompt[0]] * (longest - len(prompt)), *prompt] for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        has_padding = len({*map(len, prompts)}) > 1
        return _PaddedPrompts(send(torch.tensor(ids), device), send(torch.tensor(mask), device), has_padding)

    @property
    def position_ids(self) -> Int64[Tensor, "rows longest"]:
        return (self.mask.cumsum(1) - 1).clamp(min=0)


def _ignores_padding(policy: LanguageModelPolicy) -> bool:
    """Whether the model gives the same logits for a prompt that is padded on the left, one token at a time after it."""
    if policy.ignores_padding is None:
        policy.ignores_padding = _compare_padded(policy)
    return policy.ignores_padding


_TRIAL = ((3, 1, 4, 1), (2, 5))


def _compare_padded(policy: LanguageModelPolicy) -> bool:
    try:
        with policy.sampling():
            padded = _trial_logits(policy, _TRIAL)
            alone = torch.cat([_trial_logits(policy, [prompt]) for prompt in _TRIAL])
    except (TypeError, ValueError, RuntimeError):  # a model without position_ids or an attention mask
        return False
    return torch.allclose(padded, alone, rtol=0, atol=1e-3 * float(alone.abs().max()))


def _trial_logits(policy: LanguageModelPolicy, prompts: Sequence[TokenIds]) -> Tensor:
    """Of a token after the prompts, with the cache of the prompts."""
    batch = _PaddedPrompts.of(prompts, policy.device)
    steps = _Steps(policy, batch)
    steps.next_logits(batch.ids)
    return steps.next_logits(torch.full((len(prompts), 1), 7, device=policy.device)).float()


class _Steps:
    """A batch on its way through the model, with its cache, mask and positions. Nothing of them is sent in a step."""

    def __init__(self, policy: LanguageModelPolicy, batch: _PaddedPrompts):
        self._policy, self._cache = policy, None
        self._mask: Tensor | None = batch.mask if batch.has_padding else None
        self._position_ids: Tensor | None = batch.position_ids if batch.has_padding else None

    def next_logits(self, ids: Tensor) -> Tensor:
        """Logits of the last of these tokens."""
        more = {} if self._mask is None else {"attention_mask": self._mask, "position_ids": self._position_ids}
        output = self._policy(ids, past_key_values=self._cache, use_cache=True, **more)
        self._cache = output.past_key_values
        if self._mask is not None and self._position_ids is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(ids), 1)], 1)
            self._position_ids = self._position_ids[:, -1:] + 1
        logits: Tensor = output.logits[:, -1]
        return logits


def _generate_batch(
    policy: LanguageModelPolicy, prompts: Sequence[TokenIds], uniforms: Tensor, sampling: SamplingParams
) -> list[Completion]:
    device, batch = policy.device, _PaddedPrompts.of(prompts, policy.device)
    exact = torch.promote_types(getattr(torch, policy.config.dtype), torch.float32)
    look_every = 1 if device.type == "cpu" else STOP_CHECK_STEPS
    stop_tokens, uniforms = send_list(sampling.stop_token_ids, device), send(uniforms.to(exact), device)
    ids, sampled, running = batch.ids, list[SampledTokens](), torch.ones(len(prompts), dtype=torch.bool, device=device)
    with policy.sampling():
        steps = _Steps(policy, batch)
        while len(sampled) < sampling.max_new_tokens:
            sampled.append(sample_tokens(steps.next_logits(ids), uniforms[:, len(sampled)], sampling))
            ids = sampled[-1].ids[:, None]
            running = running & ~torch.isin(sampled[-1].ids, stop_tokens)
            if len(sampled) % look_every == 0 and not running.any():
                break
    tokens = SampledTokens.concatenate(sampled)
    counted = [tokens.num_candidates] if tokens.num_candidates is not None else []
    columns = [*torch.stack([tokens.ids, *counted]).cpu(), *torch.stack((tokens.logp, tokens.entropy)).cpu()]
    ids_by_row, *counts, logps, entropies = (column.view(len(sampled), -1).T for column in columns)
    by_row = zip(ids_by_row.tolist(), logps, entropies, counts[0] if counts else [None] * len(prompts), strict=True)
    return [_cut_after_stop(*row, sampling) for row in by_row]


def _cut_after_stop(
    ids: TokenIds, logps: Tensor, entropies: Tensor, num_candidates: Tensor | None, sampling: SamplingParams
) -> Completion:
    stop = next((position for position, token in enumerate(ids) if token in sampling.stop_token_ids), None)
    length = len(ids) if stop is None else stop + 1
    return Completion(
        tuple(ids[:length]),
        logps[:length].clone(),
        entropies[:length].clone(),
        stopped=stop is not None,
        num_candidates=None if num_candidates is None else num_candidates[:length].clone(),
    )


def score_plain(
    policy: LanguageModelPolicy,
    prompts: Sequence[TokenIds],
    completions: Sequence[Completion],
    sampling: SamplingParams,
) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs and entropies of every row's tokens, with gradient, on the CPU. All rows together, padded on the right,
    which no token before it sees.
    """
    rows = [[*prompt, *completion.ids] for prompt, completion in zip(prompts, completions, strict=True)]
    longest = max(map(len, rows))
    ids = send(torch.tensor([[*row, *[row[-1]] * (longest - len(row))] for row in rows]), policy.device)
    lengths = [len(completion) for completion in completions]
    # The token before each sampled one predicts it.
    positions = [
        row * longest + len(prompt) - 1 + index
        for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        for index in range(length)
    ]
    before = send_list(positions, policy.device)
    logits = policy(ids, use_cache=False).logits.flatten(0, 1).index_select(0, before)
    scaled, sampled_ids = scale_logits(logits, sampling), ids.flatten().index_select(0, before + 1)
    if sampling.filters_tokens:
        counts = candidate_counts(completions)
        scaled = mask_to_candidates(scaled, send(counts, policy.device), sampled_ids, most=int(counts.max()))
    logp = scaled.log_softmax(-1)
    entropies = -(logp.exp() * logp.clamp(min=MASKED_LOGIT)).sum(-1)
    both = torch.stack((logp.gather(1, sampled_ids[:, None])[:, 0], entropies)).cpu()
    return list(both[0].split(lengths)), list(both[1].split(lengths))
