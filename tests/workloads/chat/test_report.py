"""Metrics and warnings of a step, by hand."""

import torch

from groupwise.workloads.chat.config import ChatConfig, SamplingParams
from groupwise.workloads.chat.engine.sampler import Completion
from groupwise.workloads.chat.report import completion_metrics, truncation_warning


def completion(tokens, stopped, entropy):
    return Completion(tuple(range(tokens)), torch.zeros(tokens), torch.full((tokens,), entropy), stopped)


def test_completion_metrics_by_hand():
    completions = [
        completion(2, True, 1.0),
        completion(4, True, 0.5),
        completion(8, False, 0.0),
        completion(8, False, 0.1),
    ]
    metrics = completion_metrics(completions, torch.tensor([1.0, -1.0, -2.0, 0.0]))
    means = {name: column.nanmean().item() for name, column in metrics.items()}
    assert means["completion_tokens"] == 5.5
    assert means["completion_tokens_positive_advantage"] == 2
    assert means["completion_tokens_negative_advantage"] == 6  # of 4 and 8; the last row has advantage 0
    assert means["completion_tokens_terminated"] == 3
    assert means["truncated_fraction"] == 0.5
    assert abs(means["rollout_entropy"] - 0.4) < 1e-7


def test_the_warning_begins_at_the_configured_fraction():
    config, sampling = ChatConfig(truncation_warning_at=0.8), SamplingParams(max_new_tokens=32, stop_token_ids=(1,))
    assert truncation_warning({"truncated_fraction": 0.79}, config, sampling) is None
    warning = truncation_warning({"truncated_fraction": 0.8}, config, sampling)
    assert warning.startswith("80% of this step's completions reached sampling.max_new_tokens 32 without a stop token")
    assert "stop tokens [1]" in warning
