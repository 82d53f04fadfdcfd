"""Questions about mosaics for a controller, in handwriting that the model has not seen.

The model was pretrained on the training split and is surer of it than of anything new: a controller trained there would
learn that coarse looks suffice. So the validation split is cut in two by image: one half to train the controller, the
other to look at it meanwhile and to choose baselines. The test split is left for the final evaluation.
"""

import hashlib
from collections.abc import Sequence
from enum import StrEnum

import numpy as np
import torch

from groupwise.workloads.controller.adapter import Sample
from groupwise.workloads.controller.answers import Answers
from groupwise.workloads.controller.chosen_estimator import chosen_estimator
from groupwise.workloads.controller.executor import Executor
from groupwise.workloads.controller.loading import EMBEDDED, load_model
from groupwise.workloads.controller.mosaic.control import MosaicControllerConfig
from groupwise.workloads.controller.mosaic.crops import Tier, cut, image_tokens
from groupwise.workloads.controller.mosaic.digits import PLAIN_JITTER, Handwriting, Split, load_handwriting
from groupwise.workloads.controller.mosaic.questions import KINDS, ask
from groupwise.workloads.controller.mosaic.remembered import fingerprint, load_remembered
from groupwise.workloads.controller.mosaic.scene import draw_mosaics
from groupwise.workloads.controller.mosaic.words import decode
from groupwise.workloads.controller.task import Question, Source, Task


class Part(StrEnum):
    """What questions are for; no two parts share an image of a digit."""

    TRAIN = "train"
    CHOOSE = "choose"
    TEST = "test"


def handwriting_of(part: Part) -> Handwriting:
    """Return the digits of one part."""
    if part is Part.TEST:
        return load_handwriting(Split.TEST)
    whole, first = load_handwriting(Split.VALIDATION), 0 if part is Part.TRAIN else 1
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
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def mosaic_task(config: MosaicControllerConfig, device: torch.device) -> Task:
    """Return the embedded model with questions to train on, to look at, and to judge by in the end."""
    loaded, seed = load_model(EMBEDDED, device=device), config.question_seed
    shipped = load_remembered(loaded.options)
    return Task(
        executor=Executor(loaded.adapter, loaded.options),
        answers=Answers(f"mosaic {fingerprint()}, one token", config.answers, shipped=shipped),
        estimator=chosen_estimator(config.estimator, loaded, new_tokens=1, anyway=config.estimator_anyway),
        questions=mosaic_questions(Part.TRAIN, config.mosaics, seed=seed),
        held_out=mosaic_questions(Part.CHOOSE, config.held_out_mosaics, seed=seed),
        spell=lambda tokens: decode(list(tokens)),
        source=Source(EMBEDDED, loaded.identity),
        choose=lambda: mosaic_questions(Part.CHOOSE, config.choose_mosaics, seed=seed),
        test=lambda: mosaic_questions(Part.TEST, config.test_mosaics, seed=seed),
    )
