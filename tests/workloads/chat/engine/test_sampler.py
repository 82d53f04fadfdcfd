from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from groupwise.workloads.chat.config import SamplingParams
from groupwise.workloads.chat.engine.sampler import candidate_threshold, mask_to_candidates, sample_tokens

LOGITS = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("number", "token"), [(0.0, 0), (0.49, 0), (0.5, 1), (0.74, 1), (0.76, 2), (0.91, 3), (1 - 1e-16, 3)]
)
def test_the_token_is_where_the_distribution_function_passes_the_uniform_number(number, token):
    sampled = sample_tokens(LOGITS[None], torch.tensor([number], dtype=torch.float64), SamplingParams())
    assert sampled.ids.tolist() == [token]
    assert_close(sampled.logp, LOGITS[[token]])
    assert sampled.num_candidates is None


def test_frequencies_are_the_probabilities_after_top_k_and_top_p():
    # top-k 3 leaves .5 .25 .15; of these .5 / .9 + .25 / .9 = .83 passes top-p .8, so two stay: 2/3 and 1/3
    uniforms = (torch.arange(3000, dtype=torch.float64) + 0.5) / 3000
    sampled = sample_tokens(LOGITS.expand(3000, -1), uniforms, SamplingParams(top_k=3, top_p=0.8))
    assert torch.bincount(sampled.ids).tolist() == [2000, 1000]
    assert_close(sampled.logp.exp().unique(), torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))
    assert sampled.num_candidates.unique().tolist() == [2]
    assert_close(sampled.entropy[0], -(torch.tensor(2 / 3).log() * 2 / 3 + torch.tensor(1 / 3).log() / 3).double())


def test_temperature_divides_logits():
    # probabilities to the power 1 / 0.5, normalized: .25 .0625 .0225 .01 over .345
    sampled = sample_tokens(LOGITS[None], torch.tensor([0.0]), SamplingParams(temperature=0.5))
    assert_close(sampled.logp.exp(), torch.tensor([0.25 / 0.345], dtype=torch.float64))


def test_a_token_that_is_no_candidate_is_never_sampled():
    torch.manual_seed(0)
    logits, uniforms = torch.randn(500, 50), torch.rand(500, dtype=torch.float64)
    uniforms[0], uniforms[1] = 0.0, 1 - 1e-12
    sampled = sample_tokens(logits, uniforms, SamplingParams(top_k=5))
    assert (logits.gather(1, sampled.ids[:, None]) >= logits.topk(5).values[:, -1:]).all()
    assert sampled.logp.isfinite().all()


def test_ties_with_the_last_candidate_stay_and_a_sampled_token_always_does():
    tied = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    assert (tied >= candidate_threshold(tied, SamplingParams(top_k=2))).sum() == 3
    masked = mask_to_candidates(tied, torch.tensor([1]), torch.tensor([3]), most=1)
    assert masked.tolist() == [[2.0, -torch.inf, -torch.inf, 0.0]]


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(top_p=0.9)])
def test_nan_logits_give_a_nan_log_prob(sampling):
    """So that the loop can report it, instead of an index out of bounds."""
    assert sample_tokens(torch.full((1, 4), torch.nan), torch.tensor([0.5]), sampling).logp.isnan().all()
