"""Measure a pretrained mosaic model: drop order on validation, tables on test; write both beside its weights.

python scripts/score_mosaic.py --folder runs/mosaic
"""

import json
from pathlib import Path

import torch
import tyro
from rich.console import Console

from groupwise.workloads.controller.mosaic.digits import Split
from groupwise.workloads.controller.mosaic.model import ASSET, load_mosaic
from groupwise.workloads.controller.mosaic.pretrain.plan import Plan
from groupwise.workloads.controller.mosaic.score.accuracy import make_exam
from groupwise.workloads.controller.mosaic.score.card import model_card
from groupwise.workloads.controller.mosaic.score.importance import measure_drop_order, save_drop_order
from groupwise.workloads.controller.mosaic.score.knobs import CHEAPEST, FULL, GRID, SINGLE_KNOBS
from groupwise.workloads.controller.mosaic.score.tables import Measured, measure_accuracy
from groupwise.workloads.controller.mosaic.score.timing import batch1_ms


def main(
    folder: Path = ASSET,
    validation_mosaics: int = 80,
    test_mosaics: int = 200,
    timing_rounds: int = 21,
) -> None:
    """Write `importance.json`, `scores.json` and the model card `README.md` into the model's folder.

    Args:
        folder: Where the model is.
        validation_mosaics: Mosaics for the drop order and for choosing settings, 14 questions each.
        test_mosaics: Mosaics for the scores, 14 questions each.
        timing_rounds: Timings of each setting and way of computing experts.
    """
    torch.set_num_threads(1)
    say = Console(stderr=True, soft_wrap=True, highlight=False).print
    model = load_mosaic(folder)
    validation, test = make_exam(Split.VALIDATION, validation_mosaics), make_exam(Split.TEST, test_mosaics)
    order, alone = measure_drop_order(model, validation, say)
    save_drop_order(folder, order, alone)
    ms = {}
    for experts, settings in {"grouped_mm": GRID, "eager": (FULL, *SINGLE_KNOBS.values(), CHEAPEST)}.items():
        model.model.language_model.set_experts_implementation(experts)
        ms[experts] = batch1_ms(model, test, settings, drop_order=order, rounds=timing_rounds)
    measured = Measured(
        validation=measure_accuracy(model, validation, order, say),
        test=measure_accuracy(model, test, order, say),
        ms=ms,
    )
    (folder / "scores.json").write_text(json.dumps(measured.as_records(), indent=1) + "\n")
    (folder / "README.md").write_text(model_card(model, measured, order, test, Plan()))


if __name__ == "__main__":
    tyro.cli(main)
