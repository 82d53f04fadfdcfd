"""Which blocks a model misses least: its answers to one's own questions without each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from groupwise.core.errors import require
from groupwise.workloads.controller.model.executor import Answer, AnswerRequest, Executor, PrefixItem, PrefixStates
from groupwise.workloads.controller.model.inputs import stop_token_id
from groupwise.workloads.controller.model.knobs import Knobs
from groupwise.workloads.controller.model.load import LoadedModel
from groupwise.workloads.controller.task import Question

Grade = Callable[[Sequence[Question], Sequence[str]], Tensor]
"""How right each answer is, 0 to 1; nan where it is not known."""


@dataclass(frozen=True)
class BlockImportance:
    """What dropping one block alone does."""

    block: int
    accuracy_lost: float
    """Mean accuracy of the whole model less that without the block."""
    divergence: float
    """Mean KL divergence of the first token's distribution from that of the whole model, in nats."""


@dataclass(frozen=True)
class ImportanceReport:
    accuracy: float
    """Of the whole model."""
    blocks: Sequence[BlockImportance]
    """The least important first: by lost accuracy, and by divergence where that is equal."""
    questions: int
    tier: str

    @property
    def drop_order(self) -> list[int]:
        return [block.block for block in self.blocks]


@torch.inference_mode()
def measure_importance(
    loaded: LoadedModel,
    questions: Sequence[Question],
    grade: Grade,
    *,
    max_new_tokens: int = 8,
    rows_per_pass: int = 8,
    after_pass: Callable[[], None] = lambda: None,
) -> ImportanceReport:
    """At the finest tier with all experts. The first block is not dropped: some block must run before a choice."""
    require(len(questions) >= 1, "The number of questions", len(questions), "1 or more")
    options = replace(loaded.options, insertion_positions=(1,), drop_order=(1,), max_dropped_blocks=1)
    blocks = range(1, options.total_blocks)
    whole = Executor(loaded.adapter, options)
    without = {block: Executor(loaded.adapter, replace(options, drop_order=(block,))) for block in blocks}
    rights, lost, divergences = list[Tensor](), list[Tensor](), list[Tensor]()
    for first in range(0, len(questions), rows_per_pass):
        part = questions[first : first + rows_per_pass]
        prefix = whole.run_prefix([PrefixItem([question.sample], options.full.tier) for question in part])
        full = _ask(loaded, whole, part, prefix, options.full, max_new_tokens)
        fewer = replace(options.full, blocks=options.total_blocks - 1)
        others = [_ask(loaded, executor, part, prefix, fewer, max_new_tokens) for executor in without.values()]
        right = grade(part, _texts(loaded, full))
        rights.append(right)
        lost.append(torch.stack([right - grade(part, _texts(loaded, answers)) for answers in others]))
        divergences.append(torch.stack([_divergence(full, answers) for answers in others]))
        after_pass()
    columns = torch.cat(lost, 1).nanmean(1).tolist(), torch.cat(divergences, 1).mean(1).tolist()
    measured = [BlockImportance(*row) for row in zip(blocks, *columns, strict=True)]
    measured.sort(key=lambda block: (round(block.accuracy_lost, 9), block.divergence))
    return ImportanceReport(torch.cat(rights).nanmean().item(), measured, len(questions), options.full.tier)


def _ask(
    loaded: LoadedModel,
    executor: Executor,
    questions: Sequence[Question],
    prefix: PrefixStates,
    knobs: Knobs,
    max_new_tokens: int,
) -> list[Answer]:
    requests = [AnswerRequest(question.sample, knobs) for question in questions]
    stop = stop_token_id(loaded)
    return executor.answer(requests, prefix=prefix, max_new_tokens=max_new_tokens, stop_token=stop)[0]


def _texts(loaded: LoadedModel, answers: Sequence[Answer]) -> list[str]:
    return [loaded.front_end.decode(answer.tokens) for answer in answers]


def _divergence(full: Sequence[Answer], other: Sequence[Answer]) -> Tensor:
    expected, actual = (
        torch.stack([answer.first_logits for answer in answers]).double().log_softmax(-1) for answers in (full, other)
    )
    return (expected.exp() * (expected - actual)).sum(-1).cpu()
