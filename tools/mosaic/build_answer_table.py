"""Answer every question of the controller's parts under every configuration, and write the table beside the model.

python scripts/remember_mosaic.py
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import torch
import tyro
from rich.console import Console

from groupwise.workloads.controller.task import Question
from groupwise.workloads.controller.tasks.mosaic.answer_table import save_remembered
from groupwise.workloads.controller.tasks.mosaic.config import MosaicConfig
from groupwise.workloads.controller.tasks.mosaic.model import load_mosaic, mosaic_options
from groupwise.workloads.controller.tasks.mosaic.questions import KINDS
from groupwise.workloads.controller.tasks.mosaic.task import Part, mosaic_questions
from tools.mosaic.answer_table import answer_every_configuration

DEFAULTS = MosaicConfig()
_PIECE = 16


def main(
    train: int = DEFAULTS.mosaics,
    choose: int = max(DEFAULTS.choose_mosaics, DEFAULTS.held_out_mosaics),
    test: int = DEFAULTS.test_mosaics,
    question_seed: int = DEFAULTS.question_seed,
    processes: int = 2,
) -> None:
    """Write `answers.npz` of the embedded model: some seconds a mosaic on one thread.

    Args:
        train: Mosaics to train on; one question of every kind about each.
        choose: Mosaics to look at and to choose baselines on.
        test: Mosaics for the final evaluation.
        question_seed: As in the recipe.
        processes: That answer at the same time, on one thread each.
    """
    say, begun = Console(stderr=True, soft_wrap=True, highlight=False).print, time.monotonic()
    questions: list[Question] = []
    for part, mosaics in {Part.TRAIN: train, Part.CHOOSE: choose, Part.TEST: test}.items():
        questions += mosaic_questions(part, mosaics, seed=question_seed)
    pieces = [questions[start : start + _PIECE * len(KINDS)] for start in range(0, len(questions), _PIECE * len(KINDS))]
    tokens: list[np.ndarray] = []
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for found in pool.map(_answer, pieces):
            tokens.append(found)
            say(f"{sum(map(len, tokens))} of {len(questions)} questions, {time.monotonic() - begun:.0f} s")
    path = save_remembered([question.sample.name for question in questions], np.concatenate(tokens))
    say(f"{len(questions)} questions under {tokens[0].shape[1]} configurations: {path}, {path.stat().st_size:,} bytes")


def _answer(questions: Sequence[Question]) -> np.ndarray:
    torch.set_num_threads(1)
    return answer_every_configuration(load_mosaic(), mosaic_options(), questions)


if __name__ == "__main__":
    tyro.cli(main)
