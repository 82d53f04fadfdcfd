"""The controller's task on the embedded mosaic model: its questions by split, its knobs, and its samples.

The model was pretrained on the training handwriting and is more certain of it than of anything new: a controller
trained on it would learn that coarse crops suffice. So the controller's training and selection splits are two halves of
the validation handwriting, and its test split is the test handwriting.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.workloads.controller.latency.source import load_estimator
from groupwise.workloads.controller.model.adapters import Sample
from groupwise.workloads.controller.model.answer_cache import AnswerCache
from groupwise.workloads.controller.model.executor import Executor
from groupwise.workloads.controller.model.knobs import KnobOptions
from groupwise.workloads.controller.model.load import EMBEDDED, load_model
from groupwise.workloads.controller.task import ModelSource, Question, Split, Task
from groupwise.workloads.controller.tasks.mosaic.answer_table import fingerprint, load_answer_table
from groupwise.workloads.controller.tasks.mosaic.config import MosaicConfig
from groupwise.workloads.controller.tasks.mosaic.model import (
    ASSET,
    BLOCKS,
    FEWEST_BLOCKS,
    SMALLEST_TOP_K,
    TOP_K,
    load_drop_order,
)
from groupwise.workloads.controller.tasks.mosaic.questions import QUESTION_TYPES, decode, draw_questions
from groupwise.workloads.controller.tasks.mosaic.scene import (
    CROPS,
    PLAIN_JITTER,
    Handwriting,
    HandwritingSplit,
    Tier,
    cut,
    draw_mosaics,
    image_tokens,
    load_handwriting,
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
    drawn = draw_questions(np.repeat(mosaic.labels, len(QUESTION_TYPES), axis=0), types, rng)
    crops = {tier.value: cut(mosaic.pixels, tier)[0] for tier in Tier}
    questions = []
    for question_type, padded, length, answer in zip(
        QUESTION_TYPES, drawn.tokens, drawn.lengths, drawn.answers, strict=True
    ):
        tokens = padded[:length].tolist()
        questions.append(
            Question(
                sample=Sample(_sample_name(split, seed, index, mosaic.labels, tokens), crops, tuple(tokens)),
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
    name = "choose" if split is Split.SELECT else split  # as in the names that answers.npz holds
    content = f"{name} {seed} {index} {labels.ravel().tolist()} {list(tokens)}"
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def mosaic_task(config: MosaicConfig, device: torch.device) -> Task:
    """The embedded model with its questions by split."""
    loaded, seed = load_model(EMBEDDED, device=device), config.question_seed
    shipped = load_answer_table(loaded.options)
    return Task(
        executor=Executor(loaded.adapter, loaded.options),
        answers=AnswerCache(f"mosaic {fingerprint()}, one token", config.answers, shipped=shipped),
        estimator=load_estimator(config.estimator, loaded, new_tokens=1, anyway=config.estimator_anyway),
        questions=mosaic_questions(Split.TRAIN, config.mosaics, seed=seed),
        held_out=mosaic_questions(Split.SELECT, config.held_out_mosaics, seed=seed),
        decode=lambda tokens: decode(list(tokens)),
        source=ModelSource(EMBEDDED, loaded.identity),
        selection_questions=lambda: mosaic_questions(Split.SELECT, config.selection_mosaics, seed=seed),
        test_questions=lambda: mosaic_questions(Split.TEST, config.test_mosaics, seed=seed),
    )


def mosaic_options(folder: Path = ASSET) -> KnobOptions:
    """The knobs of the mosaic model in this folder."""
    return KnobOptions(
        crops={tier.value: count for tier, count in CROPS.items()},
        total_blocks=BLOCKS,
        full_top_k=TOP_K,
        drop_order=tuple(load_drop_order(folder)),
        most_dropped=BLOCKS - FEWEST_BLOCKS,
        smallest_top_k=SMALLEST_TOP_K,
    )


def mosaic_sample(pixels: Float[Tensor, "height width"], question: Sequence[int]) -> Sample:
    """One question about one mosaic, named by its content."""
    content = pixels.contiguous().numpy().tobytes() + bytes(question)
    crops = {tier.value: cut(pixels[None], tier)[0] for tier in Tier}
    return Sample(hashlib.blake2b(content, digest_size=16).hexdigest(), crops, tuple(question))
