"""Log-probs of completions under the current weights, with gradient; and which rows of a step share a pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

from groupwise.core.errors import require
from groupwise.core.transfer import send
from groupwise.core.types import Scores
from groupwise.dist.sharding import call_block
from groupwise.workloads.chat.config import SamplingParams
from groupwise.workloads.chat.engine.logprobs import token_logprobs
from groupwise.workloads.chat.engine.packing import TokenIds, pack_batch
from groupwise.workloads.chat.engine.plain import score_plain
from groupwise.workloads.chat.engine.policy import LanguageModelPolicy
from groupwise.workloads.chat.engine.sampler import Completion, candidate_counts, pad_rows

TensorsByRow = list[Tensor]


def score(
    policy: LanguageModelPolicy,
    prompts: Sequence[TokenIds],
    prompt_of_row: Sequence[int],
    completions: Sequence[Completion],
    sampling: SamplingParams,
    *,
    width: int | None = None,
    reference: bool = False,
) -> Scores:
    """Tables [rows, tokens] on the CPU, as wide as the longest completion or `width`; 0 where a row has no token.

    `sampling` is that of the rollout: a token is scored in the distribution it was sampled from. `reference` adds the
    log-probs under the reference policy (policy.reference must not be 'none'). One call is one pass;
    `split_into_passes` decides which rows it gets.
    """
    assert len(prompt_of_row) == len(completions), "a prompt for every row"
    require(sampling.temperature > 0, "sampling.temperature", sampling.temperature, "above 0 in training")
    logps, entropies = _score(policy, prompts, prompt_of_row, completions, sampling)
    reference_logp = None
    if reference:
        require(policy.has_reference, "policy.reference", policy.config.reference, "'adapter' or 'copy' for a KL term")
        with policy.reference():
            rows = call_block(policy.causal_lm, _score, policy, prompts, prompt_of_row, completions, sampling)[0]
            reference_logp = pad_rows(rows, width)
    return Scores(pad_rows(logps, width), pad_rows(entropies, width), reference_logp)


def _score(
    policy: LanguageModelPolicy,
    prompts: Sequence[TokenIds],
    prompt_of_row: Sequence[int],
    completions: Sequence[Completion],
    sampling: SamplingParams,
) -> tuple[TensorsByRow, TensorsByRow]:
    """Log-probs and entropies of every row."""
    with policy.autocast():
        if policy.shares_prefix:
            logps, entropies = _score_shared(policy, prompts, prompt_of_row, completions, sampling)
        else:
            row_prompts = [prompts[prompt] for prompt in prompt_of_row]
            logps, entropies = score_plain(policy, row_prompts, completions, sampling)
    return logps, entropies


def _score_shared(
    policy: LanguageModelPolicy,
    prompts: Sequence[TokenIds],
    prompt_of_row: Sequence[int],
    completions: Sequence[Completion],
    sampling: SamplingParams,
) -> tuple[TensorsByRow, TensorsByRow]:
    """Each prompt once, then its completions without their last tokens, whose logits nobody needs."""
    groups = _rows_by_prompt(prompt_of_row)
    inputs = [[completions[row].ids[:-1] for row in rows] for rows in groups.values()]
    packed = pack_batch([prompts[prompt] for prompt in groups], inputs, policy.device)
    hidden = policy.hidden(packed.ids[None], packed.position_ids[None], packed)

    packed_rows = [row for rows in groups.values() for row in rows]
    lengths = [len(completions[row]) for row in packed_rows]
    logit_index = _logit_index_of_tokens([len(rows) for rows in groups.values()], lengths)
    logps, entropies = token_logprobs(
        policy.head,
        hidden.index_select(0, send(logit_index, policy.device)),
        torch.tensor([token for row in packed_rows for token in completions[row].ids]),
        candidate_counts([completions[row] for row in packed_rows]) if sampling.filters_tokens else None,
        sampling.temperature,
    )
    order = sorted(range(len(packed_rows)), key=packed_rows.__getitem__)
    logps_by_row, entropies_by_row = logps.split(lengths), entropies.split(lengths)
    return [logps_by_row[index] for index in order], [entropies_by_row[index] for index in order]


def _logit_index_of_tokens(members: Sequence[int], lengths: Sequence[int]) -> Int64[Tensor, " tokens"]:
    """Which of `PackedBatch.logit_positions` predicts each token of each completion.

    The first token: its prompt's last one. Others: the token before. members: completions of each prompt.
    """
    sizes = torch.tensor(lengths)
    row_of_token = torch.arange(len(lengths)).repeat_interleave(sizes)
    index = len(members) + torch.arange(len(row_of_token)) - row_of_token - 1  # no completion has its last token there
    index[sizes.cumsum(0) - sizes] = torch.arange(len(members)).repeat_interleave(torch.tensor(members))
    return index


def split_into_passes(
    prompt_of_row: Sequence[int],
    prompt_tokens: Sequence[int],
    completion_tokens: Sequence[int],
    *,
    rows_per_pass: int,
    tokens_per_pass: int | None = None,
) -> list[Tensor]:
    """Row indices of each pass: every row once, at most `rows_per_pass` rows in a pass.

    prompt_tokens: length of each row's prompt; completion_tokens: length of each row's completion. With
    `tokens_per_pass` a pass has at most so many tokens, each prompt counted once; a single row with more is a pass
    alone. A group that fits into one pass is not split, so that its prompt is computed once.
    """
    max_tokens = tokens_per_pass if tokens_per_pass is not None else sum(prompt_tokens) + sum(completion_tokens)
    passes: list[list[int]] = []
    rows_left = tokens_left = 0  # in the last pass
    for rows in _rows_by_prompt(prompt_of_row).values():
        prompt = prompt_tokens[rows[0]]
        group_tokens = prompt + sum(completion_tokens[row] for row in rows)
        fits_one_pass = len(rows) <= rows_per_pass and group_tokens <= max_tokens
        if fits_one_pass and (len(rows) > rows_left or group_tokens > tokens_left):
            rows_left = 0
        has_prompt = False  # whether the last pass counts this prompt already
        for row in rows:
            needed = completion_tokens[row] + (0 if has_prompt else prompt)
            if rows_left < 1 or needed > tokens_left:
                passes.append([])
                rows_left, tokens_left = rows_per_pass, max_tokens
                needed = completion_tokens[row] + prompt
            passes[-1].append(row)
            has_prompt = True
            rows_left, tokens_left = rows_left - 1, tokens_left - needed
    return [torch.tensor(rows) for rows in passes]


def _rows_by_prompt(prompt_of_row: Sequence[int]) -> dict[int, list[int]]:
    """The rows of each prompt, in the order in which prompts first occur."""
    groups: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompt_of_row):
        groups.setdefault(prompt, []).append(row)
    return groups
