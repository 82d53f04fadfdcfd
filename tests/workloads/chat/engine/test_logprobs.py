"""The chunked output head against log_softmax."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from groupwise.workloads.chat.engine import logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("narrow", [False, True])
def test_the_chunked_head_has_the_gradient_of_log_softmax(monkeypatch, temperature, narrow):
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((150, 6), (40, 6), (40,)))
    ids = torch.randint(40, (150,))
    num_candidates = torch.randint(1, 40, (150,)) if narrow else None
    mixes = torch.randn(2, 150, dtype=torch.float64)
    mixes[0, 30:90] = 0  # a row without gradient is left out of the products
    for chunk in (40 * 64, 1 << 21):
        monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", chunk)
        for mix in (mixes, mixes * torch.tensor([[1.0], [0.0]], dtype=torch.float64)):
            leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
            head = logprobs.OutputHead(leaves[1], leaves[2], torch.float64)
            logps, entropies = logprobs.token_logprobs(head, leaves[0], ids, num_candidates, temperature)
            chunked = torch.autograd.grad((mix[0] * logps + mix[1] * entropies).sum(), leaves)
            leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
            scaled = (leaves[0] @ leaves[1].T + leaves[2]) / temperature
            if num_candidates is not None:
                threshold = scaled.detach().sort(descending=True).values.gather(1, num_candidates[:, None] - 1)
                masked = (scaled.detach() < threshold) & (torch.arange(40)[None] != ids[:, None])
                scaled = scaled.masked_fill(masked, -1e9)
            logp = scaled.log_softmax(-1)
            plain = (mix[0] * logp.gather(1, ids[:, None])[:, 0] - mix[1] * (logp.exp() * logp).sum(-1)).sum()
            for gradient, expected in zip(chunked, torch.autograd.grad(plain, leaves), strict=True):
                assert_close(gradient, expected, atol=1e-10, rtol=1e-9)


def test_no_tensor_of_tokens_by_vocabulary_is_ever_held(monkeypatch):
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", 4096)
    largest = 0

    class LargestTensor(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            nonlocal largest
            out = operator(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                largest = max(largest, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
            return out

    hidden, weight = torch.randn(2000, 8, requires_grad=True), torch.randn(500, 8, requires_grad=True)
    with LargestTensor():
        logps, _ = logprobs.token_logprobs(
            logprobs.OutputHead(weight, None, torch.float32), hidden, torch.randint(500, (2000,)), None, 1.0
        )
        logps.sum().backward()
    assert 0 < largest <= 64 * 500 < 2000 * 500 / 10
