"""`generate` and `score` by transformers' own forward: every row computes its whole prompt. Slow, but for any model.

The fallback for models that cannot share prompts, and the reference that the shared-prefix path is tested against.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from groupwise.workloads.chat.config import SamplingParams
from groupwise.workloads.chat.engine.packing import TokenIds
from groupwise.workloads.chat.engine.policy import LanguageModelPolicy
from groupwise.workloads.chat.engine.sampler import (
    MASKED_LOGIT,
    Completion,
    SampledTokens,
    mask_to_candidates,
    sample_tokens,
    scale_logits,
)


def generate_plain(
    policy: LanguageModelPolicy, prompts: Sequence[TokenIds], uniforms: Tensor, sampling: SamplingParams
) -> list[Completion]:
    """A completion for every row. Rows of different prompts run separately, so that no prompt is padded."""
    rows_of_prompt: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of_prompt.setdefault(tuple(prompt), []).append(row)
    completions: dict[int, Completion] = {}
    for prompt, rows in rows_of_prompt.items():
        completions |= dict(zip(rows, _generate_group(policy, prompt, uniforms[rows], sampling), strict=True))
    return [completions[row] for row in range(len(prompts))]


def _generate_group(
    policy: LanguageModelPolicy, prompt: TokenIds, uniforms: Tensor, sampling: SamplingParams
) -> list[Completion]:
    stop_tokens = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=policy.device)
    ids = torch.tensor(prompt, device=policy.device).expand(len(uniforms), -1)
    steps: list[SampledTokens] = []
    cache, running = None, torch.ones(len(uniforms), dtype=torch.bool, device=policy.device)
    with policy.sampling():
        while running.any() and len(steps) < sampling.max_new_tokens:
            output = policy(ids, past_key_values=cache, use_cache=True)
            tokens = sample_tokens(output.logits[:, -1], uniforms[:, len(steps)].to(policy.device), sampling)
            steps.append(tokens)
            running = running & ~torch.isin(tokens.ids, stop_tokens)
            cache, ids = output.past_key_values, tokens.ids[:, None]
    ids_by_row = torch.stack([tokens.ids for tokens in steps], 1).tolist()
    logps, entropies = (
        torch.stack([getattr(tokens, name) for tokens in steps], 1).cpu() for name in ("logp", "entropy")
    )
    counts = [tokens.num_candidates for tokens in steps if tokens.num_candidates is not None]
    num_candidates = torch.stack(counts, 1).cpu() if counts else [None] * len(uniforms)
    rows = zip(ids_by_row, logps, entropies, num_candidates, strict=True)
    return [_cut_after_stop(*row, sampling) for row in rows]


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
    """Log-probs and entropies of every row's tokens, one row at a time, with gradient."""
    logps, entropies = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.ids]], device=policy.device)
        logits = policy(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        scaled, sampled_ids = scale_logits(logits, sampling), ids[0, len(prompt) :]
        if completion.num_candidates is not None:
            scaled = mask_to_candidates(scaled, completion.num_candidates.to(policy.device), sampled_ids)
        logp = scaled.log_softmax(-1)
        logps.append(logp.gather(1, sampled_ids[:, None])[:, 0])
        entropies.append(-(logp.exp() * logp.clamp(min=MASKED_LOGIT)).sum(-1))
    return logps, entropies
