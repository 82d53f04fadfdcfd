"""Rollout and scoring by transformers' own forward: each row computes its whole prompt. Slow, right for any family.

It is the path of models whose cache cannot be shared, and the reference that the shared path is tested against.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from groupwise.workloads.chat.engine.policy import LanguageModelPolicy
from groupwise.workloads.chat.engine.sampler import (
    MASKED_LOGIT,
    Completion,
    SampledTokens,
    SamplingParams,
    mask_to_candidates,
    sample_tokens,
    scaled_logits,
)

TokenLogps = tuple[list[Tensor], list[Tensor]]


def generate_plain(
    policy: LanguageModelPolicy, prompts: Sequence[Sequence[int]], chances: Tensor, sampling: SamplingParams
) -> list[Completion]:
    """A completion for every row; rows of different prompts run apart, so that none is padded."""
    found: dict[int, Completion] = {}
    for rows in _rows_of_equal_prompts(prompts):
        together = _generate_group(policy, prompts[rows[0]], chances[rows], sampling)
        found |= dict(zip(rows, together, strict=True))
    return [found[row] for row in range(len(prompts))]


def _generate_group(
    policy: LanguageModelPolicy, prompt: Sequence[int], chances: Tensor, sampling: SamplingParams
) -> list[Completion]:
    stops = torch.tensor(sampling.stop_ids, dtype=torch.int64, device=policy.device)
    ids = torch.tensor(prompt, device=policy.device).expand(len(chances), -1)
    taken: list[SampledTokens] = []
    cache, alive = None, torch.ones(len(chances), dtype=torch.bool, device=policy.device)
    with policy.sampling():
        while alive.any() and len(taken) < sampling.max_new_tokens:
            output = policy(ids, past_key_values=cache, use_cache=True)
            drawn = sample_tokens(output.logits[:, -1], chances[:, len(taken)].to(policy.device), sampling)
            taken.append(drawn)
            alive = alive & ~torch.isin(drawn.ids, stops)
            cache, ids = output.past_key_values, drawn.ids[:, None]
    ids_of_rows = torch.stack([drawn.ids for drawn in taken], 1).tolist()
    metrics = [torch.stack([getattr(drawn, name) for drawn in taken], 1).cpu() for name in ("logp", "entropy")]
    counts = [drawn.kept for drawn in taken if drawn.kept is not None]
    kept = torch.stack(counts, 1).cpu() if counts else [None] * len(chances)
    rows = zip(ids_of_rows, *metrics, kept, strict=True)
    return [_completion(ids, logps, entropies, count, sampling) for ids, logps, entropies, count in rows]


def _completion(
    ids: Sequence[int], logps: Tensor, entropies: Tensor, kept: Tensor | None, sampling: SamplingParams
) -> Completion:
    """A row up to its first stop token."""
    stop = next((place for place, token in enumerate(ids) if token in sampling.stop_ids), None)
    length = len(ids) if stop is None else stop + 1
    counts = None if kept is None else kept[:length].clone()
    own = logps[:length].clone(), entropies[:length].clone()
    return Completion(tuple(ids[:length]), *own, stopped=stop is not None, kept=counts)


def score_plain(
    policy: LanguageModelPolicy,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    sampling: SamplingParams,
) -> TokenLogps:
    """Log-probabilities and entropies of every row's tokens, one row at a time, with gradient."""
    logps, entropies = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.ids]], device=policy.device)
        logits = policy(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        scaled, taken = scaled_logits(logits, sampling), ids[0, len(prompt) :]
        if completion.kept is not None:
            scaled = mask_to_candidates(scaled, completion.kept.to(policy.device), taken)
        logp = scaled.log_softmax(-1)
        logps.append(logp.gather(1, taken[:, None])[:, 0])
        entropies.append(-(logp.exp() * logp.clamp(min=MASKED_LOGIT)).sum(-1))
    return logps, entropies


def _rows_of_equal_prompts(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    rows: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows.setdefault(tuple(prompt), []).append(row)
    return list(rows.values())
