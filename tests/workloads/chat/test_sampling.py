from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from groupwise.core.errors import UserError
from groupwise.workloads.chat.config import PolicyConfig, SamplingParams
from groupwise.workloads.chat.engine.attention import attend, attention_eager
from groupwise.workloads.chat.engine.sampler import count_candidates, mask_to_candidates, sample_tokens

LOGITS = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("chance", "token"), [(0.0, 0), (0.49, 0), (0.5, 1), (0.74, 1), (0.76, 2), (0.91, 3), (1 - 1e-16, 3)]
)
def test_the_token_is_where_the_distribution_function_passes_the_chance(chance, token):
    drawn = sample_tokens(LOGITS[None], torch.tensor([chance], dtype=torch.float64), SamplingParams())
    assert drawn.ids.tolist() == [token]
    assert_close(drawn.logp, LOGITS[[token]])
    assert drawn.kept is None


def test_frequencies_are_the_probabilities_after_top_k_and_top_p():
    # top-k 3 leaves .5 .25 .15; of these .5 / .9 + .25 / .9 = .83 passes top-p .8, so two stay: 2/3 and 1/3
    chances = (torch.arange(3000, dtype=torch.float64) + 0.5) / 3000
    drawn = sample_tokens(LOGITS.expand(3000, -1), chances, SamplingParams(top_k=3, top_p=0.8))
    assert torch.bincount(drawn.ids).tolist() == [2000, 1000]
    assert_close(drawn.logp.exp().unique(), torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))
    assert drawn.kept.unique().tolist() == [2]
    assert_close(drawn.entropy[0], -(torch.tensor(2 / 3).log() * 2 / 3 + torch.tensor(1 / 3).log() / 3).double())


def test_temperature_divides_logits():
    # probabilities to the power 1 / 0.5, normalized: .25 .0625 .0225 .01 over .345
    drawn = sample_tokens(LOGITS[None], torch.tensor([0.0]), SamplingParams(temperature=0.5))
    assert_close(drawn.logp.exp(), torch.tensor([0.25 / 0.345], dtype=torch.float64))


def test_a_token_without_a_chance_is_never_drawn():
    torch.manual_seed(0)
    logits, chances = torch.randn(500, 50), torch.rand(500, dtype=torch.float64)
    chances[0], chances[1] = 0.0, 1 - 1e-12
    drawn = sample_tokens(logits, chances, SamplingParams(top_k=5))
    assert (logits.gather(1, drawn.ids[:, None]) >= logits.topk(5).values[:, -1:]).all()
    assert drawn.logp.isfinite().all()


def test_ties_at_the_edge_stay_in_and_a_taken_token_always_does():
    tied = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    assert count_candidates(tied, SamplingParams(top_k=2)).tolist() == [3]
    cut = mask_to_candidates(tied, torch.tensor([1]), torch.tensor([3]))
    assert cut.tolist() == [[2.0, -torch.inf, -torch.inf, 0.0]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"temperature": -1.0}, "temperature is -1"), ({"top_k": 0}, "top_k is 0"), ({"top_p": 1.5}, "top_p is 1.5")],
)
def test_settings_without_sense_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        SamplingParams(**settings)


def test_an_adapter_reference_needs_an_adapter():
    with pytest.raises(UserError, match="reference is adapter"):
        PolicyConfig(reference="adapter")


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(top_p=0.9)])
def test_logits_that_are_no_numbers_give_a_log_probability_that_is_none(sampling):
    """So that the loop can say what is wrong, instead of an index out of bounds."""
    assert sample_tokens(torch.full((1, 4), torch.nan), torch.tensor([0.5]), sampling).logp.isnan().all()


@pytest.mark.parametrize("autocast", [True, False])
def test_plain_products_are_as_exact_in_bfloat16_as_the_fused_kernel(autocast):
    torch.manual_seed(0)
    query, key, value = (2 * torch.randn(1, 2, tokens, 128).bfloat16() for tokens in (3, 256, 256))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output, lse = attention_eager(query, key, value, scale=128**-0.5)
        fused, fused_lse = attend(query, key, value, scale=128**-0.5)
    assert_close(lse, fused_lse, atol=1e-3, rtol=1e-4)
    assert_close(output, fused, atol=0.03, rtol=0.02)
