"""Which models share prompts, and what happens with the others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from tiny.llama import SMALL, llama, make_model, ragged_prompts, rows_for
from torch.testing import assert_close

from groupwise.core.errors import UserError
from groupwise.workloads.chat.config import PolicyConfig, SamplingParams
from groupwise.workloads.chat.engine.generate import generate
from groupwise.workloads.chat.engine.policy import make_policy
from groupwise.workloads.chat.engine.score import score

SAMPLING = SamplingParams(max_new_tokens=6, stop_token_ids=(5, 6, 7))
PROMPTS, ROWS = ragged_prompts(2), rows_for(2, 3)
OF = ROWS.condition.tolist()


def windowed() -> Any:
    return make_model(transformers.MistralConfig(**{**SMALL, "num_key_value_heads": 2, "sliding_window": 4}))


def soft_capped() -> Any:
    layers = {"num_key_value_heads": 2, "head_dim": 8, "layer_types": ["full_attention"] * 2}
    return make_model(transformers.Gemma2Config(**{**SMALL, **layers, "final_logit_softcapping": 3.0}))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (windowed, "attends within a sliding window of 4 tokens"),
        (soft_capped, "its logits differ when a prompt is shared"),
    ],
    ids=["sliding window", "soft-capped logits"],
)
def test_a_model_that_cannot_share_prompts_gives_the_reason_and_is_trained_without(make, reason):
    model = make()
    policy = make_policy(copy.deepcopy(model), PolicyConfig())
    assert not policy.shares_prefix
    assert reason in policy.plain_reason
    completions = generate(policy, PROMPTS, OF, ROWS, SAMPLING)
    scored = score(policy, PROMPTS, OF, completions, SAMPLING)
    stored = torch.nn.utils.rnn.pad_sequence([completion.logps for completion in completions], batch_first=True)
    assert_close(scored.logp, stored, atol=1e-4, rtol=0)
    with pytest.raises(UserError, match=f"{type(model).__name__} cannot share prompts: .*{reason}"):
        make_policy(copy.deepcopy(model), PolicyConfig(forward="shared_prefix"))


def test_calling_the_model_without_a_layout_says_what_to_do():
    policy = make_policy(llama(), PolicyConfig(forward="shared_prefix"))
    with pytest.raises(RuntimeError, match="set_attn_implementation"):
        policy.causal_lm(torch.tensor([[1, 2]]))
