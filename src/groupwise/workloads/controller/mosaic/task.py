"""Questions about mosaics for a controller, in handwriting that the model has not seen.

The model was pretrained on the training split and is surer of it than of anything new: a controller trained there would
learn that coarse looks suffice. So the validation split is cut in two by image: one half to train the controller, the
other to look at it meanwhile and to choose baselines. The test split is left for the final evaluation.
"""

import hashlib
from enum import StrEnum

import numpy as np
import torch

from groupwise.workloads.controller.adapter import LlavaAdapter
from groupwise.workloads.controller.answers import Answers
from groupwise.workloads.controller.estimates import CountedWork
from groupwise.workloads.controller.executor import Executor
from groupwise.workloads.controller.mosaic.control import MosaicControllerConfig
from groupwise.workloads.controller.mosaic.crops import Tier, image_tokens
from groupwise.workloads.controller.mosaic.digits import PLAIN_JITTER, Handwriting, Split, load_handwriting
from groupwise.workloads.controller.mosaic.model import ASSET, load_mosaic
from groupwise.workloads.controller.mosaic.questions import KINDS, ask
from groupwise.workloads.controller.mosaic.scene import draw_mosaics
from groupwise.workloads.controller.mosaic.steer import mosaic_options, mosaic_sample
from groupwise.workloads.controller.mosaic.words import decode
from groupwise.workloads.controller.task import Question, Task


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
    """Draw mosaics and ask one question of every kind about each; the same ones for the same arguments."""
    rng = np.random.default_rng([seed, list(Part).index(part)])
    drawn = draw_mosaics(handwriting_of(part), mosaics, PLAIN_JITTER, rng)
    asked = ask(np.repeat(drawn.labels, len(KINDS), axis=0), np.tile(np.arange(len(KINDS)), mosaics), rng)
    questions = []
    for nth, (tokens, length, answer) in enumerate(zip(asked.tokens, asked.lengths, asked.answers, strict=True)):
        words, mosaic = tokens[:length].tolist(), nth // len(KINDS)
        questions.append(
            Question(
                sample=mosaic_sample(drawn.pixels[mosaic], words),
                text=decode(words),
                answers=(decode([int(answer)]),),
                prompt_tokens={tier.value: image_tokens(tier) + len(words) for tier in Tier},
                image=f"{part} mosaic {mosaic}",
            )
        )
    return questions


def mosaic_task(config: MosaicControllerConfig, device: torch.device) -> Task:
    """Return the embedded model with questions to train on and to look at."""
    options = mosaic_options()
    return Task(
        executor=Executor(LlavaAdapter(load_mosaic().to(device)), options),
        answers=Answers(f"mosaic {_fingerprint()}, one token", config.answers),
        estimator=CountedWork(options),
        questions=mosaic_questions(Part.TRAIN, config.mosaics, seed=config.question_seed),
        held_out=mosaic_questions(Part.CHOOSE, config.held_out_mosaics, seed=config.question_seed),
        spell=lambda tokens: decode(list(tokens)),
    )


def _fingerprint() -> str:
    """Tell one trained model from the next, so that answers of an older one are never taken for its own."""
    digest = hashlib.blake2b(digest_size=8)
    for name in ("model.safetensors", "importance.json"):
        digest.update((ASSET / name).read_bytes())
    return digest.hexdigest()
