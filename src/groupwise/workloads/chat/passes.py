"""Which rows of a step go through the model together: whole groups, so that a prompt is computed once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def cut_into_passes(
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
