"""What is watched of a step, by hand."""

import torch

from groupwise.workloads.chat.config import ChatConfig, SamplingParams
from groupwise.workloads.chat.engine.sampler import Completion
from groupwise.workloads.chat.report import step_metrics, truncation_warning


def said(tokens, stopped, entropy):
    return Completion(tuple(range(tokens)), torch.zeros(tokens), torch.full((tokens,), entropy), stopped)


def test_measures_by_hand():
    completions = [said(2, True, 1.0), said(4, True, 0.5), said(8, False, 0.0), said(8, False, 0.1)]
    found = step_metrics(completions, torch.tensor([1.0, -1.0, -2.0, 0.0]))
    means = {name: column.nanmean().item() for name, column in found.items()}
    assert means["tokens"] == 5.5
    assert means["tokens_better"] == 2
    assert means["tokens_worse"] == 6  # of 4 and 8; the last row is as good as its siblings
    assert means["tokens_stopped"] == 3
    assert means["truncated_share"] == 0.5
    assert abs(means["entropy_sampled"] - 0.4) < 1e-7


def test_the_alarm_begins_where_the_config_says():
    config, sampling = ChatConfig(truncation_warning_at=0.8), SamplingParams(max_new_tokens=32, stop_ids=(1,))
    assert truncation_warning({"truncated_share": 0.79}, config, sampling) is None
    told = truncation_warning({"truncated_share": 0.8}, config, sampling)
    assert told.startswith("80% of this step's completions reached sampling.max_new_tokens 32 without a stop token")
    assert "stop tokens [1]" in told
