"""Sampling tokens by the inverse of the distribution function at a keyed random number, and completions made of them.

The same (seed, step, group, member, decision) samples the same token whatever else is in the batch. Log-probs are those
of the distribution that was sampled from, after temperature, top-k and top-p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from groupwise.workloads.chat.config import SamplingParams

MASKED_LOGIT = -1e4
"""Stands for log 0 where it is multiplied by a probability of 0."""
Logits = Float[Tensor, "rows vocabulary"]


@dataclass(frozen=True)
class Completion:
    """The sampled tokens of a row. They stay ids, never decoded and encoded again. All tensors are on the CPU."""

    ids: tuple[int, ...]
    logps: Float[Tensor, " tokens"]
    """In the distribution that was sampled from."""
    entropies: Float[Tensor, " tokens"]
    stopped: bool
    """Whether it ended with a stop token (its last one); if not, it was truncated."""
    num_candidates: Int64[Tensor, " tokens"] | None = None
    """How many tokens top-k and top-p left for each token; None where they are off."""

    def __len__(self) -> int:
        return len(self.ids)


def pad_rows(rows: Sequence[Float[Tensor, " tokens"]], width: int | None = None) -> Float[Tensor, "rows longest"]:
    """A table of rows, padded with zeros on the right to the longest row and at least to `width`."""
    table = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    return torch.nn.functional.pad(table, (0, max(0, (width or 0) - table.shape[1])))


def completion_mask(completions: Sequence[Completion], width: int | None = None) -> Bool[Tensor, "rows longest"]:
    """True where a row has a token."""
    lengths = torch.tensor([len(completion) for completion in completions])
    longest = max(int(lengths.max()), width or 0)
    return torch.arange(longest)[None] < lengths[:, None]


def candidate_counts(completions: Sequence[Completion]) -> Int64[Tensor, " tokens"]:
    """`num_candidates` of all tokens, one completion after the other."""
    return torch.cat([completion.num_candidates for completion in completions if completion.num_candidates is not None])


@dataclass(frozen=True)
class SampledTokens:
    """One token a row, and the sums from which log-probs and entropies of many steps are computed together."""

    ids: Int64[Tensor, " rows"]
    logit: Float[Tensor, " rows"]
    """The token's scaled logit."""
    max_logit: Float[Tensor, " rows"]
    sum_exp: Float[Tensor, " rows"]
    """Sum of exp(logit - max_logit) over the vocabulary."""
    sum_exp_logit: Float[Tensor, " rows"]
    """Sum of exp(logit - max_logit) x logit."""
    num_candidates: Int64[Tensor, " rows"] | None
    """How many tokens had a probability above 0; None where all had."""

    @property
    def logp(self) -> Float[Tensor, " rows"]:
        """Log-prob in the distribution that was sampled from."""
        return self.logit - (self.max_logit + self.sum_exp.log())

    @property
    def entropy(self) -> Float[Tensor, " rows"]:
        return self.max_logit + self.sum_exp.log() - self.sum_exp_logit / self.sum_exp

    @staticmethod
    def concatenate(parts: Sequence[SampledTokens]) -> SampledTokens:
        counts = [part.num_candidates for part in parts if part.num_candidates is not None]
        names = ("ids", "logit", "max_logit", "sum_exp", "sum_exp_logit")
        columns = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        return SampledTokens(**columns, num_candidates=torch.cat(counts) if counts else None)


def sample_tokens(logits: Logits, uniforms: Float[Tensor, " rows"], sampling: SamplingParams) -> SampledTokens:
    """The token at which the distribution function passes the row's uniform number, which is in [0, 1)."""
    if sampling.temperature == 0:
        return _greedy(logits)
    if not torch.is_autocast_enabled(logits.device.type):
        return _sample(logits, uniforms, sampling)
    with torch.autocast(logits.device.type, enabled=False):
        return _sample(logits, uniforms, sampling)


def _greedy(logits: Logits) -> SampledTokens:
    """The likeliest token, with probability 1."""
    ids = logits.argmax(-1)
    zeros = torch.zeros(len(ids), dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    return SampledTokens(ids, zeros, zeros, zeros + 1, zeros, None)


def _sample(logits: Logits, uniforms: Float[Tensor, " rows"], sampling: SamplingParams) -> SampledTokens:
    scaled = scale_logits(logits, sampling)
    threshold, num_candidates = candidate_threshold(scaled, sampling), None
    if threshold is not None:
        num_candidates = (scaled >= threshold).sum(-1).clamp(min=1)
        scaled = scaled.masked_fill(scaled < threshold, -torch.inf)
    highest = scaled.amax(-1, keepdim=True)
    weights = (scaled - highest).exp_()
    cdf = weights.cumsum(-1)
    total = cdf[:, -1:]
    # Rounding can turn a uniform number into 1, beyond all tokens. The largest number below 1, times `total`, is below
    # `total`.
    target = uniforms[:, None].to(cdf).clamp_(max=1 - torch.finfo(cdf.dtype).eps / 2) * total
    # With NaN logits any token will do: its log-prob is NaN, which the loop reports.
    ids = torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[1] - 1)
    finite = scaled if num_candidates is None else scaled.clamp(min=MASKED_LOGIT)
    return SampledTokens(
        ids[:, 0],
        scaled.gather(1, ids)[:, 0],
        highest[:, 0],
        total.clone()[:, 0],  # a view would keep all of `cdf` in memory
        torch.linalg.vecdot(weights, finite),
        num_candidates,
    )


def scale_logits(logits: Logits, sampling: SamplingParams) -> Logits:
    """Logits divided by the temperature, in float32 at least."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return exact if sampling.temperature == 1 else exact / sampling.temperature


def candidate_threshold(scaled: Logits, sampling: SamplingParams) -> Float[Tensor, "rows 1"] | None:
    """The lowest logit that top-k and top-p leave, with all that tie with it; None where all stay."""
    if not sampling.filters_tokens:
        return None
    ordered = scaled.topk(min(sampling.top_k or scaled.shape[1], scaled.shape[1])).values
    count = torch.full((len(scaled), 1), ordered.shape[1], device=scaled.device)
    if sampling.top_p is not None:
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        count = (before < sampling.top_p).sum(-1, keepdim=True).clamp(min=1)
    return ordered.gather(1, count - 1)


def mask_to_candidates(
    scaled: Logits, num_candidates: Int64[Tensor, " rows"], sampled_ids: Int64[Tensor, " rows"], *, most: int
) -> Logits:
    """Minus infinity for all tokens but the likeliest `num_candidates` (`most` at most) and the sampled one.

    The number of candidates belongs to the decision: scoring under other weights uses the number of the rollout. The
    sampled token may then no longer be among the likeliest. It stays, else its ratio would have no gradient.
    """
    threshold = scaled.topk(most).values.gather(1, num_candidates[:, None] - 1)
    masked = (scaled < threshold).scatter_(1, sampled_ids[:, None], False)
    return scaled.masked_fill(masked, -torch.inf)
