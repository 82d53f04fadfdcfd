"""Batch-1 time of one question from crops to answer: through the executor, and with transformers' own forward pass."""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from transformers import LlavaForConditionalGeneration

from groupwise.workloads.controller.adapter import LlavaAdapter, Sample
from groupwise.workloads.controller.executor import Executor, Request
from groupwise.workloads.controller.knobs import KnobOptions, Knobs
from groupwise.workloads.controller.mosaic.model import answer_logits, configured, kept_blocks
from groupwise.workloads.controller.mosaic.score.accuracy import Exam
from groupwise.workloads.controller.mosaic.score.knobs import Setting
from groupwise.workloads.controller.mosaic.steer import mosaic_sample

OneAnswer = Callable[[Sample, Setting], object]


def by_executor(model: LlavaForConditionalGeneration, options: KnobOptions) -> OneAnswer:
    """Return a way to answer one question through the executor."""
    executor = Executor(LlavaAdapter(model), options)
    return lambda sample, setting: executor.answer(
        [Request(sample, Knobs(setting.tier, 1, setting.top_k, setting.blocks))]
    )


def by_transformers(model: LlavaForConditionalGeneration, drop_order: Sequence[int]) -> OneAnswer:
    """Return a way to answer one question with transformers alone."""

    @torch.inference_mode()
    def answer(sample: Sample, setting: Setting) -> object:
        with configured(model, kept_blocks(drop_order, setting.blocks), setting.top_k):
            return answer_logits(model, sample.crops[setting.tier], sample.question, setting.tier)

    return answer


def batch1_ms(answer: OneAnswer, exam: Exam, settings: Sequence[Setting], *, rounds: int) -> Mapping[Setting, float]:
    """Return the lower quartile of each setting's milliseconds: a shared machine is slow for seconds at a time.

    All settings are timed in each round, another question each round, in another order each round.
    """
    order, shuffled = list(settings), random.Random(0)
    seen: dict[Setting, list[float]] = {setting: [] for setting in settings}
    for number in range(rounds):
        row = number * exam.questions_per_mosaic + number % exam.questions_per_mosaic
        question = exam.questions.tokens[row, : exam.questions.lengths[row]].tolist()
        sample = mosaic_sample(exam.mosaics.pixels[number], question)
        shuffled.shuffle(order)
        for setting in order:
            # The first pass warms caches and the allocator for this setting's shapes.
            answer(sample, setting)
            started = time.perf_counter()
            answer(sample, setting)
            seen[setting].append((time.perf_counter() - started) * 1e3)
    return {setting: statistics.quantiles(values, n=4)[0] for setting, values in seen.items()}
