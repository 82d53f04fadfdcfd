"""Log-probabilities of completions under the present weights, with gradient.
Which rows of a step go through the model together: whole groups, so that a prompt is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

from groupwise.core.errors import require
from groupwise.core.types import Scores
from groupwise.workloads.chat.engine.logprobs import token_logprobs
from groupwise.workloads.chat.engine.packing import pack_batch
from groupwise.workloads.chat.engine.plain import score_plain
from groupwise.workloads.chat.engine.policy import LanguageModelPolicy
from groupwise.workloads.chat.engine.sampler import Completion, SamplingParams, pad_rows

Prompts = Sequence[Sequence[int]]
TokensOfRows = tuple[list[Tensor], list[Tensor]]


def score(
    policy: LanguageModelPolicy,
    prompts: Prompts,
    prompt_of_row: Sequence[int],
    completions: Sequence[Completion],
    sampling: SamplingParams,
    *,
    width: int | None = None,
    reference: bool = False,
) -> Scores:
    """Tables of [rows, longest completion, or `width` if that is wider], 0 where a row has no token; on the CPU.

    `sampling` is that of the rollout: a token is scored in the distribution it was drawn from. `reference` asks for the
    reference's log-probabilities too (policy.reference must not be 'none'). One call is one pass;
    `split_into_passes` says which rows to put into it.
    """
    assert len(prompt_of_row) == len(completions), "a prompt for every row"
    require(sampling.temperature > 0, "sampling.temperature", sampling.temperature, "above 0 in training")
    logps, entropies = _score(policy, prompts, prompt_of_row, completions, sampling)
    under_reference = None
    if reference:
        require(policy.has_reference, "policy.reference", policy.config.reference, "'adapter' or 'copy' for a KL term")
        with policy.reference():
            under_reference = pad_rows(_score(policy, prompts, prompt_of_row, completions, sampling)[0], width)
    return Scores(pad_rows(logps, width), pad_rows(entropies, width), under_reference)


def _score(
    policy: LanguageModelPolicy,
    prompts: Prompts,
    prompt_of_row: Sequence[int],
    completions: Sequence[Completion],
    sampling: SamplingParams,
) -> TokensOfRows:
    with policy.autocast():
        if policy.shares_prompts:
            logps, entropies = _score_shared(policy, prompts, prompt_of_row, completions, sampling)
        else:
            of_rows = [prompts[nth] for nth in prompt_of_row]
            logps, entropies = score_plain(policy, of_rows, completions, sampling)
    return [row.cpu() for row in logps], [row.cpu() for row in entropies]


def _score_shared(
    policy: LanguageModelPolicy,
    prompts: Prompts,
    prompt_of_row: Sequence[int],
    completions: Sequence[Completion],
    sampling: SamplingParams,
) -> TokensOfRows:
    """Each prompt once, its completions after it; a completion's last token predicts nothing and stays out."""
    members: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompt_of_row):
        members.setdefault(prompt, []).append(row)
    rows = [row for group in members.values() for row in group]
    inputs = [[completions[row].ids[:-1] for row in group] for group in members.values()]
    packed = pack_batch([prompts[prompt] for prompt in members], inputs, policy.device)
    hidden = policy.hidden(packed.ids[None], packed.positions[None], packed)
    lengths = [len(completions[row]) for row in rows]
    counts = [completions[row].kept for row in rows]
    logps, entropies = token_logprobs(
        policy.head,
        hidden[_logit_index_of_tokens([len(group) for group in members.values()], lengths).to(policy.device)],
        torch.tensor([token for row in rows for token in completions[row].ids], device=policy.device),
        torch.cat([count for count in counts if count is not None]).to(policy.device) if sampling.truncates else None,
        sampling.temperature,
    )
    order = sorted(range(len(rows)), key=rows.__getitem__)
    by_row = [list(column.split(lengths)) for column in (logps, entropies)]
    return [by_row[0][nth] for nth in order], [by_row[1][nth] for nth in order]


def _logit_index_of_tokens(members: Sequence[int], lengths: Sequence[int]) -> Int64[Tensor, " tokens"]:
    """Which of `PackedBatch.predicting` predicts each token of each completion: its prompt's, then the token before."""
    sizes = torch.tensor(lengths)
    row_of_token = torch.arange(len(lengths)).repeat_interleave(sizes)
    before = len(members) + torch.arange(len(row_of_token)) - row_of_token - 1  # each completion lacks its last token
    before[sizes.cumsum(0) - sizes] = torch.arange(len(members)).repeat_interleave(torch.tensor(members))
    return before


def split_into_passes(
    prompt_of_row: Sequence[int],
    prompt_tokens: Sequence[int],
    completion_tokens: Sequence[int],
    *,
    rows_per_pass: int,
    tokens_per_pass: int | None = None,
) -> list[Tensor]:
    """Numbers of rows, pass after pass: every row once, at most `rows_per_pass` of them together.

    prompt_tokens: of each row's prompt; completion_tokens: of each row. With `tokens_per_pass`, a pass has at most so
    many tokens, a prompt counted once; a single row with more is a pass of its own. A group that fits into one pass is
    not cut. How rows are cut does not change the gradient.
    """
    groups: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompt_of_row):
        groups.setdefault(prompt, []).append(row)
    budget = tokens_per_pass if tokens_per_pass is not None else sum(prompt_tokens) + sum(completion_tokens)
    cuts: list[list[int]] = []
    room_rows, room_tokens = 0, 0
    for rows in groups.values():
        prompt = prompt_tokens[rows[0]]
        whole = prompt + sum(completion_tokens[row] for row in rows)
        alone = len(rows) <= rows_per_pass and whole <= budget
        begun = False  # whether the open pass holds this prompt
        if alone and (len(rows) > room_rows or whole > room_tokens):
            room_rows = 0
        for row in rows:
            need = completion_tokens[row] + (0 if begun else prompt)
            if room_rows < 1 or need > room_tokens:
                cuts.append([])
                room_rows, room_tokens = rows_per_pass, budget
                need = completion_tokens[row] + prompt
            cuts[-1].append(row)
            begun = True
            room_rows, room_tokens = room_rows - 1, room_tokens - need
    return [torch.tensor(rows) for rows in cuts]
