"""The controller's task on the embedded mosaic model: its questions by split, its knobs, and its samples.

The model was pretrained on the training handwriting and is more certain of it than of anything new: a controller
trained on it would learn that coarse crops suffice. So the controller's training and selection splits are two halves of
the validation handwriting, and its test split is the test handwriting.
"""

from collections.abc import Sequence

import numpy as np
import torch

from groupwise.core.groups import content_hash
from groupwise.workloads.controller.latency.source import load_estimator
from groupwise.workloads.controller.model.adapters import Sample
from groupwise.workloads.controller.model.answer_cache import AnswerCache
from groupwise.workloads.controller.model.executor import Executor
from groupwise.workloads.controller.serving.server import ServedTimer
from groupwise.workloads.controller.task import ModelSource, Question, Split, Task
from groupwise.workloads.controller.tasks.mosaic.answer_table import fingerprint, load_answer_table, load_other_answers
from groupwise.workloads.controller.tasks.mosaic.config import MosaicConfig
from groupwise.workloads.controller.tasks.mosaic.model import load
from groupwise.workloads.controller.tasks.mosaic.questions import QUESTION_TYPES, decode, draw_questions
from groupwise.workloads.controller.tasks.mosaic.scene import (
    PLAIN_JITTER,
    Handwriting,
    HandwritingSplit,
    Tier,
    cut,
    draw_mosaics,
    image_tokens,
    load_handwriting,
    shrink_whole,
)


def handwriting_of(split: Split) -> Handwriting:
    if split is Split.TEST:
        return load_handwriting(HandwritingSplit.TEST)
    whole, first = load_handwriting(HandwritingSplit.VALIDATION), 0 if split is Split.TRAIN else 1
    return Handwriting(whole.images[first::2], whole.labels[first::2], whole.source_rows[first::2])


def mosaic_questions(split: Split, mosaics: int, *, seed: int = 0) -> list[Question]:
    """One question of every type about each mosaic. More mosaics only add to those of a smaller number."""
    handwriting = handwriting_of(split)
    return [question for index in range(mosaics) for question in _about_one(split, index, handwriting, seed)]


def _about_one(split: Split, index: int, handwriting: Handwriting, seed: int) -> list[Question]:
    rng = np.random.default_rng([seed, list(Split).index(split), index])
    mosaic = draw_mosaics(handwriting, 1, PLAIN_JITTER, rng)
    types = np.arange(len(QUESTION_TYPES))
    labels, framed = (np.repeat(of_mosaic, len(QUESTION_TYPES), axis=0) for of_mosaic in (mosaic.labels, mosaic.framed))
    drawn = draw_questions(labels, framed, types, rng)
    crops = {tier.value: cut(mosaic.pixels, tier)[0] for tier in Tier}
    (overview,), questions = shrink_whole(mosaic.pixels), []
    for question_type, padded, length, answer in zip(
        QUESTION_TYPES, drawn.tokens, drawn.lengths, drawn.answers, strict=True
    ):
        tokens = padded[:length].tolist()
        name = _sample_name(split, seed, index, mosaic.labels, tokens)
        questions.append(
            Question(
                sample=Sample(name, crops, tuple(tokens), overview=overview),
                text=decode(tokens),
                answers=(decode([int(answer)]),),
                prompt_tokens={tier.value: image_tokens(tier) + len(tokens) for tier in Tier},
                image=f"{split} mosaic {index}",
                question_type=question_type.value,
            )
        )
    return questions


def _sample_name(split: Split, seed: int, index: int, labels: np.ndarray, tokens: Sequence[int]) -> str:
    """A hash of labels and seeds, not of pixels: their last bits depend on the machine, and the precomputed answers
    would not be found.
    """
    content = f"{split} {seed} {index} {labels.ravel().tolist()} {list(tokens)}"
    return content_hash(content)


def mosaic_task(config: MosaicConfig, device: torch.device) -> Task:
    """The embedded model with its questions by split."""
    loaded, seed, warnings = load(device=device), config.question_seed, list[str]()
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
            warn=warnings.append,
        ),
        questions=mosaic_questions(Split.TRAIN, config.mosaics, seed=seed),
        held_out=mosaic_questions(Split.SELECT, config.held_out_mosaics, seed=seed),
        decode=loaded.front_end.decode,
        source=ModelSource(loaded.name, loaded.fingerprint),
        selection_questions=lambda: mosaic_questions(Split.SELECT, config.selection_mosaics, seed=seed),
        test_questions=lambda: mosaic_questions(Split.TEST, config.test_mosaics, seed=seed),
        other_answers=load_other_answers(loaded.options),
        warnings=warnings,
    )
