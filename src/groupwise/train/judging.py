"""Asking a workload for rewards: all rows at once, or fewer groups at a time where memory is short."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.groups import Groups
from groupwise.core.types import Rollouts, Terms
from groupwise.workloads.base import Workload


def judge_in_pieces(workload: Workload, rollouts: Rollouts, rows: int | None) -> Terms:
    """The workload's terms for every row; siblings are always judged together, at most `rows` rows at a time."""
    if rows is None or rows >= len(rollouts):
        return _judge(workload, rollouts)
    values: dict[str, Tensor] = {}
    steps: dict[str, Tensor] = {}
    failures: dict[str, str] = {}
    for piece in pieces_of_whole_groups(rollouts.group_ids, rows):
        terms = _judge(workload, rollouts.select(piece))
        for name, column in terms.values.items():
            missing = torch.full((len(rollouts),), torch.nan, dtype=torch.float64)
            values.setdefault(name, missing)[piece] = column.cpu().double()
        for name, table in terms.steps.items():
            missing = torch.full(rollouts.logp.shape, torch.nan, dtype=torch.float64)
            steps.setdefault(name, missing)[piece] = table.cpu().double()
        failures = {**terms.failures, **failures}
    return Terms(values, failures, steps)


def pieces_of_whole_groups(group_ids: Tensor, rows: int) -> Iterator[Tensor]:
    """The rows of as many groups as make up at most `rows` rows, or of one group if it alone is larger."""
    line = Groups.of(group_ids).line
    piece: list[int] = []
    for group in line.unique().tolist():
        members = (line == group).nonzero().flatten().tolist()
        if piece and len(piece) + len(members) > rows:
            yield torch.tensor(piece)
            piece = []
        piece += members
    yield torch.tensor(piece)


def _judge(workload: Workload, rollouts: Rollouts) -> Terms:
    terms = workload.rewards(rollouts)
    if not isinstance(terms, Terms):
        raise UserError(f"rewards() returned {type(terms).__name__}: it must return groupwise.Terms.")
    for name, column in terms.values.items():
        if column.shape != (len(rollouts),):
            raise UserError(
                f"Reward '{name}' has shape {tuple(column.shape)} for {len(rollouts)} rows: it must be one number a"
                " row."
            )
    for name, table in terms.steps.items():
        if table.shape != rollouts.logp.shape:
            raise UserError(
                f"Reward '{name}' of decisions has shape {tuple(table.shape)} where the rollouts have"
                f" {tuple(rollouts.logp.shape)}: it must be one number a decision."
            )
    return terms
