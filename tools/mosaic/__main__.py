"""Rebuild the embedded mosaic model, step by step.

    python -m tools.mosaic pretrain --folder runs/mosaic     resumes after a kill
    python -m tools.mosaic importance                        measures the drop order of its blocks
    python -m tools.mosaic answer-table                      precomputes its answers for the recipe `controller`
    python -m tools.mosaic contact-sheet                     draws the families of mosaics for the docs

Before `importance`, copy config.json, generation_config.json and model.safetensors from the folder into
src/groupwise/workloads/controller/tasks/mosaic/asset.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from rich.console import Console

from groupwise.workloads.controller.task import Question, Split
from groupwise.workloads.controller.tasks.mosaic.answer_table import options_of_other_order, save_answer_table
from groupwise.workloads.controller.tasks.mosaic.config import MosaicConfig
from groupwise.workloads.controller.tasks.mosaic.model import (
    ASSET,
    load_drop_order,
    load_mosaic,
    load_other_drop_orders,
    mosaic_options,
)
from groupwise.workloads.controller.tasks.mosaic.questions import make_question_set
from groupwise.workloads.controller.tasks.mosaic.scene import HandwritingSplit
from groupwise.workloads.controller.tasks.mosaic.task import mosaic_questions
from tools.mosaic.answer_table import answer_in_processes
from tools.mosaic.contact_sheet import draw_contact_sheet
from tools.mosaic.curriculum import PretrainConfig
from tools.mosaic.importance import find_drop_orders, save_drop_orders
from tools.mosaic.pretrain import pretrain

_CONSOLE = Console(stderr=True, soft_wrap=True, highlight=False)
_DEFAULTS = MosaicConfig()


@dataclass(frozen=True)
class PretrainCommand:
    """Train the model on the CPU and write it, in bfloat16, as transformers saves it."""

    folder: Path
    """Where checkpoints and the model are written."""
    config: PretrainConfig = field(default_factory=PretrainConfig)
    """What the run depends on; a checkpoint of another config is refused."""
    compiled: bool = True
    """Compile the training pass; needs a C++ compiler."""
    checkpoint_every: int = 50
    """Steps between checkpoints."""
    threads: int = 2
    """CPU threads. Another number rounds differently."""

    def run(self) -> None:
        torch.set_num_threads(self.threads)
        learner = pretrain(
            self.config,
            self.folder,
            print_line=_CONSOLE.print,
            compiled=self.compiled,
            checkpoint_every=self.checkpoint_every,
        )
        learner.model.to(torch.bfloat16).save_pretrained(self.folder)
        _CONSOLE.print(f"The model is in {self.folder}.")


@dataclass(frozen=True)
class ImportanceCommand:
    """Write importance.json: in which order blocks are dropped, measured on validation mosaics."""

    mosaics: int = 200
    """With two questions of every type each."""

    def run(self) -> None:
        questions = make_question_set(HandwritingSplit.VALIDATION, self.mosaics)
        save_drop_orders(ASSET, find_drop_orders(load_mosaic(), questions, _CONSOLE.print))


@dataclass(frozen=True)
class AnswerTableCommand:
    """Write answers.npz: answers under every configuration; some seconds per mosaic on one thread."""

    train: int = _DEFAULTS.mosaics
    """Mosaics of the training split, with one question of every type each."""
    select: int = max(_DEFAULTS.selection_mosaics, _DEFAULTS.held_out_mosaics)
    """Mosaics of the selection split."""
    test: int = _DEFAULTS.test_mosaics
    """Mosaics of the test split."""
    question_seed: int = _DEFAULTS.question_seed
    """As in the recipe."""
    processes: int = 2
    """Each on one thread."""

    def run(self) -> None:
        started = time.monotonic()
        questions: list[Question] = []
        for split, mosaics in {Split.TRAIN: self.train, Split.SELECT: self.select, Split.TEST: self.test}.items():
            questions += mosaic_questions(split, mosaics, seed=self.question_seed)

        def print_progress(done: int) -> None:
            _CONSOLE.print(f"{done} of {len(questions)} questions, {time.monotonic() - started:.0f} s")

        names = [question.sample.name for question in questions]
        tokens: dict[tuple[int, ...], np.ndarray] = {}
        for order in (tuple(load_drop_order()), *load_other_drop_orders()):
            _CONSOLE.print(f"Drop order {', '.join(map(str, order))}")
            options = mosaic_options() if not tokens else options_of_other_order(order)
            tokens[order] = answer_in_processes(
                questions, options, processes=self.processes, on_progress=print_progress
            )
        own, *others = tokens.values()
        path = save_answer_table(names, own, others)
        _CONSOLE.print(f"{len(questions)} questions under {own.shape[1]} configurations: {path}")


@dataclass(frozen=True)
class ContactSheetCommand:
    """Draw the families of mosaics, as the docs show them."""

    file: Path = Path("docs/mosaic.png")

    def run(self) -> None:
        draw_contact_sheet(self.file)


def main(arguments: list[str] | None = None) -> None:
    commands: dict[str, Callable[..., Any]] = {
        "pretrain": PretrainCommand,
        "importance": ImportanceCommand,
        "answer-table": AnswerTableCommand,
        "contact-sheet": ContactSheetCommand,
    }
    tyro.extras.subcommand_cli_from_dict(commands, prog="python -m tools.mosaic", args=arguments).run()


if __name__ == "__main__":
    main()
