"""Batch-1 time of one question from pixels to answer, with transformers' own forward pass."""

import statistics
import time
from collections.abc import Sequence

import torch
from transformers import LlavaForConditionalGeneration

from groupwise.workloads.controller.mosaic.crops import cut
from groupwise.workloads.controller.mosaic.model import answer_logits, configured, kept_blocks
from groupwise.workloads.controller.mosaic.score.accuracy import Exam
from groupwise.workloads.controller.mosaic.score.knobs import Setting


def batch1_ms(
    model: LlavaForConditionalGeneration,
    exam: Exam,
    settings: Sequence[Setting],
    *,
    drop_order: Sequence[int],
    rounds: int,
) -> dict[Setting, float]:
    """Return the median milliseconds of each setting.

    All settings are timed in each round, another question each, so that a slow spell of the machine meets all of them.
    """
    seen: dict[Setting, list[float]] = {setting: [] for setting in settings}
    for number in range(rounds):
        for setting in settings:
            seen[setting].append(_one_answer_ms(model, exam, setting, drop_order, number))
    return {setting: statistics.median(values) for setting, values in seen.items()}


@torch.inference_mode()
def _one_answer_ms(
    model: LlavaForConditionalGeneration, exam: Exam, setting: Setting, drop_order: Sequence[int], number: int
) -> float:
    crops = cut(exam.mosaics.pixels[number : number + 1], setting.tier)[0]
    row = number * exam.questions_per_mosaic + number % exam.questions_per_mosaic
    question = exam.questions.tokens[row, : exam.questions.lengths[row]].tolist()
    kept = kept_blocks(drop_order, setting.blocks)
    with configured(model, kept, setting.top_k):
        # The first pass warms caches and the allocator for this setting's shapes.
        answer_logits(model, crops, question, setting.tier)
        started = time.perf_counter()
        answer_logits(model, crops, question, setting.tier)
        return (time.perf_counter() - started) * 1e3
