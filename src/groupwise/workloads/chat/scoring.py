"""Log-probabilities of completions under the present weights, with gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from groupwise.core.errors import require
from groupwise.core.types import Scored
from groupwise.workloads.chat.completion import Completion, padded
from groupwise.workloads.chat.plain import score_plainly
from groupwise.workloads.chat.policy import Policy
from groupwise.workloads.chat.sampling import Sampling


def score(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    prompt_of_row: Sequence[int],
    completions: Sequence[Completion],
    sampling: Sampling,
    *,
    width: int | None = None,
    reference: bool = False,
) -> Scored:
    """Tables of [rows, longest completion, or `width` if that is wider], 0 where a row has no token; on the CPU.

    `sampling` is that of the rollout: a token is scored in the distribution it was drawn from. `reference` asks for the
    reference's log-probabilities too (policy.reference must not be 'none'). One call is one pass: `cut_into_passes`
    cuts a step's rows by rows and tokens, and groups stay whole where they can.
    """
    assert len(prompt_of_row) == len(completions), "a prompt for every row"
    require(sampling.temperature > 0, "sampling.temperature", sampling.temperature, "above 0 in training")
    of_rows = [prompts[nth] for nth in prompt_of_row]
    logps, entropies = _score(policy, of_rows, completions, sampling)
    under_reference = None
    if reference:
        require(policy.has_reference, "policy.reference", policy.config.reference, "'adapter' or 'copy' for a KL term")
        with policy.reference():
            under_reference = padded(_score(policy, of_rows, completions, sampling)[0], width)
    return Scored(padded(logps, width), padded(entropies, width), under_reference)


def _score(
    policy: Policy, prompts: Sequence[Sequence[int]], completions: Sequence[Completion], sampling: Sampling
) -> tuple[list[Tensor], list[Tensor]]:
    with policy.autocast():
        logps, entropies = score_plainly(policy, prompts, completions, sampling)
    return [row.cpu() for row in logps], [row.cpu() for row in entropies]


def cut_into_passes(
    prompts: Sequence[Sequence[int]],
    prompt_of_row: Sequence[int],
    completions: Sequence[Completion],
    *,
    rows_per_pass: int,
    tokens_per_pass: int | None = None,
) -> list[Tensor]:
    """Numbers of the rows that one pass after another scores: every row once, at most `rows_per_pass` of them, and at
    most `tokens_per_pass` tokens (a prompt counts once per pass), unless a single row has more.

    Groups stay whole where they fit. How rows are cut does not change the gradient.
    """
    by_prompt = sorted(range(len(completions)), key=lambda row: prompt_of_row[row])
    return [torch.tensor(by_prompt[start : start + rows_per_pass]) for start in range(0, len(by_prompt), rows_per_pass)]
