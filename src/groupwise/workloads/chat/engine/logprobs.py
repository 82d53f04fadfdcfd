"""Log-probabilities from hidden states without ever holding [tokens, vocabulary], neither forward nor backward.

A chunk of tokens at a time: logits, what is wanted of them, gone. The backward pass computes them once more and forms
the gradients of hidden states and weights chunk by chunk. With p the probabilities, T the temperature and g the
gradient of log p(token): d hidden = g (W[token] - p W) / T and d W = sum (onehot(token) - p) (g hidden / T).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from groupwise.workloads.chat.engine.sampler import MASKED_LOGIT, mask_to_candidates

LOGITS_PER_CHUNK = 1 << 21
"""Logits that are held at a time."""
_FEWEST_TOKENS = 64  # below, matrix products are no longer fast


@dataclass(frozen=True)
class OutputHead:
    """The last linear layer of a language model."""

    weight: Float[Tensor, "vocabulary width"]
    bias: Float[Tensor, " vocabulary"] | None
    dtype: torch.dtype
    """What its products are computed in."""

    def rounded(self) -> OutputHead:
        """With weights in the dtype of its products: made once, for many calls."""
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return OutputHead(self.weight.to(self.dtype), bias, self.dtype)

    def logits(self, hidden: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens vocabulary"]:
        """All of them: for few tokens only."""
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return torch.nn.functional.linear(hidden.to(self.dtype), self.weight.to(self.dtype), bias)


def token_logprobs(
    head: OutputHead,
    hidden: Float[Tensor, "tokens width"],
    ids: Int64[Tensor, " tokens"],
    kept: Int64[Tensor, " tokens"] | None,
    temperature: float,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Log-probability of each token and entropy of its distribution, with gradients."""
    job = _HeadInputs(ids, kept, temperature, head.dtype)
    logps, entropies = _TokenLogprobs.apply(hidden, head.weight, head.bias, job)
    return logps, entropies


@dataclass(frozen=True, eq=False)
class _HeadInputs:
    ids: Tensor
    kept: Tensor | None
    temperature: float
    dtype: torch.dtype

    def chunks(self, vocabulary: int) -> Iterator[slice]:
        size = max(_FEWEST_TOKENS, LOGITS_PER_CHUNK // vocabulary)
        for start in range(0, len(self.ids), size):
            yield slice(start, min(start + size, len(self.ids)))

    def scaled(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: slice | Tensor) -> Tensor:
        """Logits over the temperature, minus infinity for tokens without a chance."""
        logits = hidden[tokens].to(self.dtype) @ weight.T
        scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if bias is not None:
            scaled += bias
        if self.temperature != 1:
            scaled /= self.temperature
        return scaled if self.kept is None else mask_to_candidates(scaled, self.kept[tokens], self.ids[tokens])


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: _HeadInputs
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            rounded = weight.to(job.dtype)
            found = [
                _chunk_logprobs(job.scaled(hidden, rounded, bias, part), job.ids[part], all_kept=job.kept is None)
                for part in job.chunks(len(weight))
            ]
        logps, lse, entropy = (torch.cat(column) for column in zip(*found, strict=True))
        ctx.save_for_backward(hidden, weight, bias, lse, entropy)
        ctx.job = job
        return logps, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, lse, entropy = ctx.saved_tensors
        sums = _HeadGradients(hidden, weight, bias, ctx.job, ctx.needs_input_grad[1])
        by_logp, by_entropy = grads
        spread = bool(by_entropy.any())
        for part in ctx.job.chunks(len(weight)):
            tokens = (by_logp[part] != 0).nonzero().flatten() + part.start if not spread else part
            if spread or len(tokens):
                sums.add(tokens, by_logp[tokens], by_entropy[tokens] if spread else None, lse[tokens], entropy[tokens])
        return sums.hidden, sums.weight, sums.bias, None


def _chunk_logprobs(scaled: Tensor, ids: Tensor, *, all_kept: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the tokens, log-sum-exp, entropy."""
    highest = scaled.amax(-1, keepdim=True)
    weights = (scaled - highest).exp_()
    total = weights.sum(-1)
    lse = highest[:, 0] + total.log()
    finite = scaled if all_kept else scaled.clamp(min=MASKED_LOGIT)
    entropy = lse - torch.linalg.vecdot(weights, finite) / total
    return scaled.gather(1, ids[:, None])[:, 0] - lse, lse, entropy


class _HeadGradients:
    """The gradients, chunk by chunk."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: _HeadInputs, trained: bool):
        self.source, self.rounded, self.job, self.offset = hidden, weight.to(job.dtype), job, bias
        self.hidden = torch.zeros_like(hidden)
        exact = torch.promote_types(weight.dtype, torch.float32)
        self.weight = torch.zeros_like(weight, dtype=exact) if trained else None
        self.bias = torch.zeros_like(bias) if bias is not None and trained else None

    def add(
        self, tokens: slice | Tensor, by_logp: Tensor, by_entropy: Tensor | None, lse: Tensor, entropy: Tensor
    ) -> None:
        """The share of these tokens. `push` times `factor` is what the distribution takes; the taken token is apart."""
        job, source = self.job, self.source[tokens].to(self.job.dtype)
        log_p = job.scaled(self.source, self.rounded, self.offset, tokens).sub_(lse[:, None])
        pull, ids = (by_logp[:, None] / job.temperature).to(lse), job.ids[tokens]
        if by_entropy is None:
            push, factor = log_p.exp_(), pull
        else:
            spread = by_entropy[:, None] / job.temperature * (log_p.clamp(min=MASKED_LOGIT) + entropy[:, None])
            push, factor = (spread + pull).mul_(log_p.exp_()), torch.ones_like(pull)
        push = push.to(job.dtype)
        self.hidden[tokens] = (pull * self.rounded[ids] - factor * (push @ self.rounded)).to(self.hidden.dtype)
        if self.weight is not None:
            self._subtract_from_weight(push, (factor * source).to(job.dtype))
            self.weight.index_add_(0, ids, (pull * source).to(self.weight.dtype))
        if self.bias is not None:
            self.bias -= (factor * push).sum(0).to(self.bias.dtype)
            self.bias.index_add_(0, ids, pull[:, 0].to(self.bias.dtype))

    def _subtract_from_weight(self, push: Tensor, hidden: Tensor) -> None:
        assert self.weight is not None
        if push.dtype == self.weight.dtype:
            self.weight.addmm_(push.T, hidden, alpha=-1)
        else:
            self.weight -= push.T @ hidden
