"""Which blocks the model misses least: measured on validation handwriting, stored beside the weights."""

import json
from collections.abc import Callable
from pathlib import Path

from transformers import LlavaForConditionalGeneration

from groupwise.workloads.controller.mosaic.crops import Tier
from groupwise.workloads.controller.mosaic.model import BLOCKS, FEWEST_BLOCKS, FIRST_DROPPABLE_BLOCK, TOP_K
from groupwise.workloads.controller.mosaic.score.accuracy import Exam, answer_losses, features_of

_FILE = "importance.json"


def measure_drop_order(
    model: LlavaForConditionalGeneration, exam: Exam, say: Callable[[str], None]
) -> tuple[list[int], dict[int, float]]:
    """Return the blocks in the order they are dropped, and what dropping each alone adds to the mean loss.

    One block after the other: next goes the one without which, and without those before it, the loss is smallest.
    """
    features = features_of(model, exam, Tier.HIGH)

    def loss_without(dropped: list[int]) -> float:
        kept = [block for block in range(BLOCKS) if block not in dropped]
        return float(answer_losses(model, exam, features, blocks=kept, top_k=TOP_K)[1].mean())

    whole = loss_without([])
    order: list[int] = []
    alone: dict[int, float] = {}
    for dropped_already in range(BLOCKS - FEWEST_BLOCKS):
        candidates = [block for block in range(FIRST_DROPPABLE_BLOCK, BLOCKS) if block not in order]
        losses = {block: loss_without([*order, block]) for block in candidates}
        if not dropped_already:
            alone = {block: round(loss - whole, 4) for block, loss in losses.items()}
        order.append(min(losses, key=losses.__getitem__))
        say(f"drop block {order[-1]}: loss {whole:.3f} -> {losses[order[-1]]:.3f}")
    return order, alone


def save_drop_order(folder: Path, order: list[int], alone: dict[int, float]) -> None:
    """Write the order and the measurements it came from."""
    content = {"drop_order": order, "loss_added_by_dropping_alone": alone, "split": "validation", "tier": "high"}
    (folder / _FILE).write_text(json.dumps(content, indent=2) + "\n")


def load_drop_order(folder: Path) -> list[int]:
    """Return the stored order: the block to drop first comes first."""
    return [int(block) for block in json.loads((folder / _FILE).read_text())["drop_order"]]
