"""Drawing tokens: the inverse of the distribution function at a keyed random number.

The same (seed, step, group, member, decision) picks the same token whoever stands beside it in the batch. What is
stored is the log-probability in the distribution that was sampled from, after temperature, top-k and top-p.
What a rollout of one prompt is: token ids, and what is known of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from groupwise.workloads.chat.config import SamplingParams

__all__ = [
    "MASKED_LOGIT",
    "SampledTokens",
    "SamplingParams",
    "count_candidates",
    "mask_to_candidates",
    "sample_tokens",
    "scaled_logits",
]

MASKED_LOGIT = -1e4
"""Stands for log 0 where it is multiplied by a probability of 0."""
Logits = Float[Tensor, "rows vocabulary"]


@dataclass(frozen=True)
class SampledTokens:
    """One token a row, and of its distribution what the metrics are made of: for many draws at once, when asked."""

    ids: Int64[Tensor, " rows"]
    taken: Float[Tensor, " rows"]
    """The token's scaled logit."""
    highest: Float[Tensor, " rows"]
    total: Float[Tensor, " rows"]
    """Sum of weights exp(logit - highest)."""
    weighted: Float[Tensor, " rows"]
    """Sum of weight x logit."""
    kept: Int64[Tensor, " rows"] | None
    """How many tokens had a chance; None where all had."""

    @property
    def logp(self) -> Float[Tensor, " rows"]:
        """Log-probability in the distribution that was sampled from."""
        return self.taken - (self.highest + self.total.log())

    @property
    def entropy(self) -> Float[Tensor, " rows"]:
        return self.highest + self.total.log() - self.weighted / self.total

    @staticmethod
    def joined(parts: Sequence[SampledTokens]) -> SampledTokens:
        """One after another."""
        counts = [part.kept for part in parts if part.kept is not None]
        names = ("ids", "taken", "highest", "total", "weighted")
        columns = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        return SampledTokens(**columns, kept=torch.cat(counts) if counts else None)


def sample_tokens(logits: Logits, chances: Float[Tensor, " rows"], sampling: SamplingParams) -> SampledTokens:
    """The token at which the distribution function passes `chances` (in [0, 1))."""
    if sampling.temperature == 0:
        return _greedy(logits)
    if not torch.is_autocast_enabled(logits.device.type):
        return _sample(logits, chances, sampling)
    with torch.autocast(logits.device.type, enabled=False):
        return _sample(logits, chances, sampling)


def _sample(logits: Logits, chances: Float[Tensor, " rows"], sampling: SamplingParams) -> SampledTokens:
    scaled = scaled_logits(logits, sampling)
    kept = count_candidates(scaled, sampling)
    if kept is not None:
        scaled = mask_to_candidates(scaled, kept)
    highest = scaled.amax(-1, keepdim=True)
    weights = (scaled - highest).exp_()
    reached = weights.cumsum(-1)
    total = reached[:, -1:]
    # Rounded, a chance can become 1, past all tokens; the largest number below 1 stays below `total` when multiplied.
    goal = chances[:, None].to(reached).clamp_(max=1 - torch.finfo(reached.dtype).eps / 2) * total
    # Where the logits are no numbers any token will do: its log-probability is NaN, and the loop tells the user.
    ids = torch.searchsorted(reached, goal, right=True).clamp_(max=reached.shape[1] - 1)
    finite = scaled if kept is None else scaled.clamp(min=MASKED_LOGIT)
    taken, ended = scaled.gather(1, ids), total.clone()  # a view would keep all of `reached`
    return SampledTokens(ids[:, 0], taken[:, 0], highest[:, 0], ended[:, 0], torch.linalg.vecdot(weights, finite), kept)


def scaled_logits(logits: Logits, sampling: SamplingParams) -> Logits:
    """Logits over the temperature, in float32 at least."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return exact if sampling.temperature == 1 else exact / sampling.temperature


def count_candidates(scaled: Logits, sampling: SamplingParams) -> Int64[Tensor, " rows"] | None:
    """How many of the likeliest tokens top-k and top-p leave; a tie at the edge stays in. None where all stay."""
    if not sampling.truncates:
        return None
    ordered = scaled.topk(min(sampling.top_k or scaled.shape[1], scaled.shape[1])).values
    count = torch.full((len(scaled), 1), ordered.shape[1], device=scaled.device)
    if sampling.top_p is not None:
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        count = (before < sampling.top_p).sum(-1, keepdim=True).clamp(min=1)
    return (scaled >= ordered.gather(1, count - 1)).sum(-1).clamp(min=1)


def mask_to_candidates(
    scaled: Logits, kept: Int64[Tensor, " rows"], taken: Int64[Tensor, " rows"] | None = None
) -> Logits:
    """Minus infinity for all but the `kept` likeliest tokens and the one that was taken.

    The number of kept tokens belongs to the decision and stays as it was. Under other weights a taken token may fall
    out of the likeliest: it counts all the same, else its ratio would have no gradient to come back by.
    """
    edge = scaled.topk(int(kept.max())).values.gather(1, kept[:, None] - 1)
    out = scaled < edge
    if taken is not None:
        out.scatter_(1, taken[:, None], False)
    return scaled.masked_fill(out, -torch.inf)


def _greedy(logits: Logits) -> SampledTokens:
    ids = logits.argmax(-1)
    certain = torch.zeros(len(ids), dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    return SampledTokens(ids, certain, certain, certain + 1, certain, None)


@dataclass(frozen=True)
class Completion:
    """Tokens that were drawn. They stay ids: nothing is decoded and encoded again. All tensors are on the CPU."""

    ids: tuple[int, ...]
    logps: Float[Tensor, " tokens"]
    """In the distribution that was sampled from."""
    entropies: Float[Tensor, " tokens"]
    stopped: bool
    """Whether it ended by a stop token (its last one); if not, it was truncated."""
    kept: Int64[Tensor, " tokens"] | None = None
    """How many tokens top-k and top-p left each time; None where they are off."""

    def __len__(self) -> int:
        return len(self.ids)


def pad_rows(rows: Sequence[Float[Tensor, " tokens"]], width: int | None = None) -> Float[Tensor, "rows longest"]:
    """Rows side by side, zeros on the right, at least `width` wide."""
    table = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    return torch.nn.functional.pad(table, (0, max(0, (width or 0) - table.shape[1])))


def completion_mask(completions: Sequence[Completion], width: int | None = None) -> Bool[Tensor, "rows longest"]:
    """True where a row has a token."""
    lengths = torch.tensor([len(completion) for completion in completions])
    longest = max(int(lengths.max()), width or 0)
    return torch.arange(longest)[None] < lengths[:, None]
