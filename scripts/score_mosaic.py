"""Measure a pretrained mosaic model: which blocks it misses least, then what it scores in every setting, and how fast.

python scripts/score_mosaic.py importance
python scripts/remember_mosaic.py
python scripts/score_mosaic.py card
"""

import json
from typing import Annotated

import tyro
from rich.console import Console

from groupwise.core.errors import UserError
from groupwise.meter.process import settle_in
from groupwise.workloads.controller.mosaic.control import MosaicControllerConfig
from groupwise.workloads.controller.mosaic.digits import Split
from groupwise.workloads.controller.mosaic.model import ASSET, load_mosaic
from groupwise.workloads.controller.mosaic.pretrain.plan import Plan
from groupwise.workloads.controller.mosaic.remembered import load_remembered
from groupwise.workloads.controller.mosaic.score.accuracy import make_exam
from groupwise.workloads.controller.mosaic.score.card import model_card
from groupwise.workloads.controller.mosaic.score.importance import (
    load_drop_order,
    measure_importance,
    save_importance,
)
from groupwise.workloads.controller.mosaic.score.knobs import CHEAPEST, FULL, GRID, SINGLE_KNOBS
from groupwise.workloads.controller.mosaic.score.tables import Measured, remembered_accuracy
from groupwise.workloads.controller.mosaic.score.timing import batch1_ms, by_executor, by_transformers
from groupwise.workloads.controller.mosaic.steer import mosaic_options
from groupwise.workloads.controller.mosaic.task import Part, mosaic_questions


def importance(mosaics: int = 200) -> None:
    """Write `importance.json`: what dropping each block costs on validation mosaics, 18 questions each."""
    say = Console(stderr=True, soft_wrap=True, highlight=False).print
    save_importance(ASSET, measure_importance(load_mosaic(), make_exam(Split.VALIDATION, mosaics), say))


def card(timing_rounds: int = 20) -> None:
    """Write `scores.json` and the model card `README.md`; times are of single answers, this often in each setting."""
    model, options, asked = load_mosaic(), mosaic_options(), MosaicControllerConfig()
    remembered = load_remembered(options)
    if remembered is None:
        raise UserError("The table of answers is of another model: run scripts/remember_mosaic.py first.")
    test, exam = mosaic_questions(Part.TEST, asked.test_mosaics), make_exam(Split.TEST, timing_rounds)
    some = (FULL, *SINGLE_KNOBS.values(), CHEAPEST)
    measured = Measured(
        validation=remembered_accuracy(mosaic_questions(Part.CHOOSE, asked.choose_mosaics), remembered),
        test=remembered_accuracy(test, remembered),
        ms={
            "executor": batch1_ms(by_executor(model, options), exam, GRID, rounds=timing_rounds),
            "transformers": batch1_ms(by_transformers(model, load_drop_order(ASSET)), exam, some, rounds=timing_rounds),
        },
    )
    (ASSET / "scores.json").write_text(json.dumps(measured.as_records(), indent=1) + "\n")
    (ASSET / "README.md").write_text(
        model_card(model, measured, load_drop_order(ASSET), Plan(), test_questions=len(test))
    )


def main(step: Annotated[str, tyro.conf.Positional]) -> None:
    """Measure `importance`, or write the `card`."""
    settle_in(1)
    {"importance": importance, "card": card}[step]()


if __name__ == "__main__":
    tyro.cli(main)
