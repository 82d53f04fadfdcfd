"""Log-probs and entropies of given tokens from hidden states, with gradients; [tokens, vocabulary] is never held.

The forward pass makes logits for one chunk of tokens at a time and drops them. The backward pass recomputes them and
adds up the gradients of hidden states and weights chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from groupwise.core.transfer import send
from groupwise.workloads.chat.config import LOGITS_PER_CHUNK, MIN_CHUNK_TOKENS
from groupwise.workloads.chat.engine.sampler import MASKED_LOGIT, mask_to_candidates


@dataclass(frozen=True)
class OutputHead:
    """The last linear layer of a language model."""

    weight: Float[Tensor, "vocabulary width"]
    bias: Float[Tensor, " vocabulary"] | None
    dtype: torch.dtype
    """Dtype of its matrix products."""

    def cast(self) -> OutputHead:
        """With weights in `dtype` and without gradient: cast once, for many calls of `logits`."""
        bias = None if self.bias is None else self.bias.detach().to(self.dtype)
        return OutputHead(self.weight.detach().to(self.dtype), bias, self.dtype)

    def logits(self, hidden: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens vocabulary"]:
        """The logits of all tokens together: for few tokens only."""
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return torch.nn.functional.linear(hidden.to(self.dtype), self.weight.to(self.dtype), bias)


def token_logprobs(
    head: OutputHead,
    hidden: Float[Tensor, "tokens width"],
    ids: Int64[Tensor, " tokens"],
    num_candidates: Int64[Tensor, " tokens"] | None,
    temperature: float,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Log-prob of each token and entropy of its distribution, with gradients; both on the CPU, copied together.

    `ids` and `num_candidates` are on the CPU as well, so that nothing is asked of the device to find them.
    """
    device = hidden.device
    counts = None if num_candidates is None else send(num_candidates, device)
    most = 0 if num_candidates is None else int(num_candidates.max())
    inputs = _HeadInputs(send(ids, device), counts, most, temperature, head.dtype)
    logps, entropies = _TokenLogprobs.apply(hidden, head.weight, head.bias, inputs)
    return logps, entropies


@dataclass(frozen=True, eq=False)
class _HeadInputs:
    """What the head needs besides tensors with a gradient."""

    ids: Tensor
    num_candidates: Tensor | None
    most_candidates: int
    temperature: float
    dtype: torch.dtype

    def chunks(self, vocabulary: int) -> Iterator[slice]:
        size = max(MIN_CHUNK_TOKENS, LOGITS_PER_CHUNK // vocabulary)
        for start in range(0, len(self.ids), size):
            yield slice(start, min(start + size, len(self.ids)))

    def scaled_logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: slice | Tensor) -> Tensor:
        """Logits divided by the temperature; minus infinity for tokens that are no candidates."""
        logits = hidden[tokens].to(self.dtype) @ weight.T
        scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if bias is not None:
            scaled += bias
        if self.temperature != 1:
            scaled /= self.temperature
        if self.num_candidates is None:
            return scaled
        counts, ids = self.num_candidates[tokens], self.ids[tokens]
        return mask_to_candidates(scaled, counts, ids, most=self.most_candidates)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, inputs: _HeadInputs
    ) -> tuple[Tensor, Tensor]:
        filtered = inputs.num_candidates is not None
        with torch.autocast(hidden.device.type, enabled=False):
            cast_weight = weight.to(inputs.dtype)
            chunks = [
                _chunk_logprobs(
                    inputs.scaled_logits(hidden, cast_weight, bias, chunk), inputs.ids[chunk], filtered=filtered
                )
                for chunk in inputs.chunks(len(weight))
            ]
        logps, lse, entropies = (torch.cat(column) for column in zip(*chunks, strict=True))
        ctx.save_for_backward(hidden, weight, bias, lse, entropies)
        ctx.inputs = inputs
        if hidden.device.type == "cpu":
            return logps, entropies
        on_host = torch.stack((logps, entropies)).cpu()
        return on_host[0].clone(), on_host[1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, lse, entropies = ctx.saved_tensors
        gradients = _HeadGradients(hidden, weight, bias, ctx.inputs, ctx.needs_input_grad[1])
        on_host, device = grads[0], hidden.device
        grad_logp, grad_entropy = (send(grad, device) for grad in grads)
        needs_entropy = bool(grads[1].any())
        for chunk in ctx.inputs.chunks(len(weight)):
            if needs_entropy:
                gradients.add(chunk, grad_logp[chunk], grad_entropy[chunk], lse[chunk], entropies[chunk])
                continue
            tokens = send((on_host[chunk] != 0).nonzero().flatten() + chunk.start, device)
            if len(tokens):
                gradients.add(tokens, grad_logp[tokens], None, lse[tokens], entropies[tokens])
        return gradients.hidden, gradients.weight, gradients.bias, None


def _chunk_logprobs(scaled: Tensor, ids: Tensor, *, filtered: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the tokens, log-sum-exp, entropy."""
    highest = scaled.amax(-1, keepdim=True)
    weights = (scaled - highest).exp_()
    total = weights.sum(-1)
    lse = highest[:, 0] + total.log()
    finite = scaled.clamp(min=MASKED_LOGIT) if filtered else scaled
    entropy = lse - torch.linalg.vecdot(weights, finite) / total
    return scaled.gather(1, ids[:, None])[:, 0] - lse, lse, entropy


class _HeadGradients:
    """Gradients of hidden states, weight and bias, added up chunk by chunk.

    With p the probabilities, T the temperature and g the gradient of log p(token):
    d hidden = g (W[token] - p W) / T and d W = sum (onehot(token) - p) (g hidden / T).
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, inputs: _HeadInputs, trained: bool):
        self.inputs, self.head_hidden = inputs, hidden
        self.head_weight, self.head_bias = weight.to(inputs.dtype), bias
        self.hidden = torch.zeros_like(hidden)
        exact = torch.promote_types(weight.dtype, torch.float32)
        self.weight = torch.zeros_like(weight, dtype=exact) if trained else None
        self.bias = torch.zeros_like(bias) if bias is not None and trained else None

    def add(
        self, tokens: slice | Tensor, grad_logp: Tensor, grad_entropy: Tensor | None, lse: Tensor, entropy: Tensor
    ) -> None:
        """Add the gradients of these tokens: of all probabilities (grad_probs x factor), and of the sampled token."""
        inputs, head_weight = self.inputs, self.head_weight
        hidden, ids = self.head_hidden[tokens].to(inputs.dtype), inputs.ids[tokens]
        logp = inputs.scaled_logits(self.head_hidden, head_weight, self.head_bias, tokens).sub_(lse[:, None])
        grad_logit = (grad_logp[:, None] / inputs.temperature).to(lse)
        if grad_entropy is None:
            grad_probs, factor = logp.exp_(), grad_logit
        else:
            by_entropy = grad_entropy[:, None] / inputs.temperature * (logp.clamp(min=MASKED_LOGIT) + entropy[:, None])
            grad_probs, factor = (by_entropy + grad_logit).mul_(logp.exp_()), torch.ones_like(grad_logit)
        grad_probs = grad_probs.to(inputs.dtype)
        self.hidden[tokens] = (grad_logit * head_weight[ids] - factor * (grad_probs @ head_weight)).to(
            self.hidden.dtype
        )
        if self.weight is not None:
            self._subtract_from_weight(grad_probs, (factor * hidden).to(inputs.dtype))
            self.weight.index_add_(0, ids, (grad_logit * hidden).to(self.weight.dtype))
        if self.bias is not None:
            self.bias -= (factor * grad_probs).sum(0).to(self.bias.dtype)
            self.bias.index_add_(0, ids, grad_logit[:, 0].to(self.bias.dtype))

    def _subtract_from_weight(self, grad_probs: Tensor, hidden: Tensor) -> None:
        assert self.weight is not None
        if grad_probs.dtype == self.weight.dtype:
            self.weight.addmm_(grad_probs.T, hidden, alpha=-1)
        else:
            self.weight -= grad_probs.T @ hidden
