"""What is watched of a step's completions: lengths, truncation, certainty; and when to raise the alarm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from groupwise.workloads.chat.completion import Completion
from groupwise.workloads.chat.config import ChatConfig
from groupwise.workloads.chat.engine_config import Sampling

TRUNCATED = "truncated_share"


def measures_of(completions: Sequence[Completion], advantages: Tensor) -> dict[str, Tensor]:
    """One number a row; NaN where a row has no part in a figure."""
    tokens = torch.tensor([float(len(completion)) for completion in completions])
    stopped = torch.tensor([completion.stopped for completion in completions])
    entropies = torch.stack([completion.entropies.double().mean() for completion in completions])
    return {
        "tokens": tokens,
        "tokens_better": tokens.masked_fill(advantages <= 0, torch.nan),
        "tokens_worse": tokens.masked_fill(advantages >= 0, torch.nan),
        "tokens_stopped": tokens.masked_fill(~stopped, torch.nan),
        TRUNCATED: (~stopped).double(),
        "entropy_sampled": entropies,
    }


def alarm_of(figures: Mapping[str, float], config: ChatConfig, sampling: Sampling) -> str | None:
    """A sentence when nearly all completions were cut off, so that rewards say little about them."""
    share = figures[TRUNCATED]
    if share < config.truncation_alarm:
        return None
    return (
        f"{share:.0%} of this step's completions reached sampling.max_new_tokens {sampling.max_new_tokens} without a"
        " stop token: what they earn says little. Raise max_new_tokens, check that the prompt's template and the stop"
        f" tokens {list(sampling.stop_ids)} are the model's, or reward shorter answers (judge.functions 'length')."
    )
