"""Which blocks the model misses least: measured on validation handwriting, stored beside the weights."""

import json
from collections.abc import Callable
from pathlib import Path

from transformers import LlavaForConditionalGeneration

from groupwise.workloads.controller.mosaic.crops import Tier
from groupwise.workloads.controller.mosaic.model import BLOCKS, FEWEST_BLOCKS, FIRST_DROPPABLE_BLOCK, TOP_K
from groupwise.workloads.controller.mosaic.score.accuracy import Exam, answer_losses, features_of

_FILE = "importance.json"


def measure_importance(
    model: LlavaForConditionalGeneration, exam: Exam, say: Callable[[str], None]
) -> dict[int, float]:
    """Return what dropping each block alone adds to the mean loss, the least important block first.

    Blocks before the latest insertion position always run.
    """
    features = features_of(model, exam, Tier.HIGH)

    def loss_without(dropped: int | None) -> float:
        kept = [block for block in range(BLOCKS) if block != dropped]
        return float(answer_losses(model, exam, features, blocks=kept, top_k=TOP_K)[1].mean())

    whole = loss_without(None)
    added = {block: round(loss_without(block) - whole, 4) for block in range(FIRST_DROPPABLE_BLOCK, BLOCKS)}
    order = sorted(added, key=added.__getitem__)
    say(f"loss {whole:.3f}; added by dropping a block: {', '.join(f'{block}: {added[block]:.3f}' for block in order)}")
    return {block: added[block] for block in order}


def save_importance(folder: Path, added: dict[int, float]) -> list[int]:
    """Write the measurements and the order that follows from them; return the order."""
    order = list(added)[: BLOCKS - FEWEST_BLOCKS]
    content = {"drop_order": order, "loss_added_by_dropping_alone": added, "split": "validation", "tier": "high"}
    (folder / _FILE).write_text(json.dumps(content, indent=2) + "\n")
    return order


def load_drop_order(folder: Path) -> list[int]:
    """Return the stored order: the block to drop first comes first."""
    return [int(block) for block in json.loads((folder / _FILE).read_text())["drop_order"]]
