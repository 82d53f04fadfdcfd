"""Questions about mosaics for a controller, in handwriting that the model has not seen.

The model was pretrained on the training split and is surer of it than of anything new: a controller trained there would
learn that coarse looks suffice. So the validation split is cut in two by image: one half to train the controller, the
other to look at it meanwhile and to choose baselines. The test split is left for the final evaluation.
"""

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
import torch

from groupwise.core.groups import content_hash
from groupwise.workloads.controller.latency.source import load_estimator
from groupwise.workloads.controller.model.adapters import Sample
from groupwise.workloads.controller.model.answer_cache import AnswerCache
from groupwise.workloads.controller.model.executor import Executor
from groupwise.workloads.controller.serving.server import ServedTimer
from groupwise.workloads.controller.task import ModelSource, Question, Task
from groupwise.workloads.controller.tasks.mosaic.answer_table import fingerprint, load_answer_table
from groupwise.workloads.controller.tasks.mosaic.config import MosaicConfig
from groupwise.workloads.controller.tasks.mosaic.model import load
from groupwise.workloads.controller.tasks.mosaic.questions import KINDS, ask, decode
from groupwise.workloads.controller.tasks.mosaic.scene import (
    PLAIN_JITTER,
    Handwriting,
    HandwritingSplit,
    Tier,
    cut,
    draw_mosaics,
    image_tokens,
    load_handwriting,
)


class Part(StrEnum):
    """What questions are for; no two parts share an image of a digit."""

    TRAIN = "train"
    CHOOSE = "choose"
    TEST = "test"


def handwriting_of(part: Part) -> Handwriting:
    """Return the digits of one part."""
    if part is Part.TEST:
        return load_handwriting(HandwritingSplit.TEST)
    whole, first = load_handwriting(HandwritingSplit.VALIDATION), 0 if part is Part.TRAIN else 1
    return Handwriting(whole.images[first::2], whole.labels[first::2], whole.source_rows[first::2])


def mosaic_questions(part: Part, mosaics: int, *, seed: int = 0) -> list[Question]:
    """Draw mosaics and ask one question of every kind about each; the first ones of many are those of few."""
    handwriting = handwriting_of(part)
    return [question for number in range(mosaics) for question in _about_one(part, number, handwriting, seed)]


def _about_one(part: Part, number: int, handwriting: Handwriting, seed: int) -> list[Question]:
    rng = np.random.default_rng([seed, list(Part).index(part), number])
    drawn = draw_mosaics(handwriting, 1, PLAIN_JITTER, rng)
    asked = ask(np.repeat(drawn.labels, len(KINDS), axis=0), np.arange(len(KINDS)), rng)
    crops = {tier.value: cut(drawn.pixels, tier)[0] for tier in Tier}
    questions = []
    for kind, tokens, length, answer in zip(KINDS, asked.tokens, asked.lengths, asked.answers, strict=True):
        words = tokens[:length].tolist()
        questions.append(
            Question(
                sample=Sample(_name(part, seed, number, drawn.labels, words), crops, tuple(words)),
                text=decode(words),
                answers=(decode([int(answer)]),),
                prompt_tokens={tier.value: image_tokens(tier) + len(words) for tier in Tier},
                image=f"{part} mosaic {number}",
                kind=kind.value,
            )
        )
    return questions


def _name(part: Part, seed: int, number: int, labels: np.ndarray, words: Sequence[int]) -> str:
    """By what was drawn, not by the pixels: their last bits depend on the machine, and answers would not be found."""
    content = f"{part} {seed} {number} {labels.ravel().tolist()} {list(words)}"
    return content_hash(content)


def mosaic_task(config: MosaicConfig, device: torch.device) -> Task:
    """Return the embedded model with questions to train on, to look at, and to judge by in the end."""
    loaded, seed = load(device=device), config.question_seed
    return Task(
        executor=Executor(loaded.adapter, loaded.options),
        answers=AnswerCache(
            f"mosaic {fingerprint()}, one token", config.answers, precomputed=load_answer_table(loaded.options)
        ),
        estimator=load_estimator(
            config.estimator,
            loaded,
            new_tokens=1,
            timer_for=ServedTimer,
            allow_mismatch=config.allow_estimator_mismatch,
        ),
        questions=mosaic_questions(Part.TRAIN, config.mosaics, seed=seed),
        held_out=mosaic_questions(Part.CHOOSE, config.held_out_mosaics, seed=seed),
        spell=loaded.front_end.decode,
        source=ModelSource(loaded.name, loaded.fingerprint),
        choose=lambda: mosaic_questions(Part.CHOOSE, config.choose_mosaics, seed=seed),
        test=lambda: mosaic_questions(Part.TEST, config.test_mosaics, seed=seed),
    )
