"""Which blocks the model misses least, measured on validation handwriting."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from transformers import LlavaForConditionalGeneration

from groupwise.workloads.controller.tasks.mosaic.model import (
    BLOCKS,
    FEWEST_BLOCKS,
    FIRST_DROPPABLE_BLOCK,
    IMPORTANCE_FILE,
    TOP_K,
)
from groupwise.workloads.controller.tasks.mosaic.questions import QUESTION_TOKENS, QuestionSet
from groupwise.workloads.controller.tasks.mosaic.scene import Tier
from tools.mosaic.dense_forward import pack, text_pass
from tools.mosaic.losses import encode_mosaics

_MOSAICS_PER_PASS = 25


@torch.no_grad()
def features_of(
    model: LlavaForConditionalGeneration, question_set: QuestionSet, tier: Tier
) -> Float[Tensor, "mosaics tokens width"]:
    """Projected image features of each mosaic."""
    parts = question_set.mosaics.pixels.split(_MOSAICS_PER_PASS)
    return torch.cat([encode_mosaics(model, part, tier).projected.flatten(1, 2) for part in parts])


@torch.no_grad()
def answer_losses(
    model: LlavaForConditionalGeneration,
    question_set: QuestionSet,
    features: Float[Tensor, "mosaics tokens width"],
    *,
    blocks: Sequence[int],
    top_k: int,
) -> tuple[np.ndarray, np.ndarray]:
    """For each question, whether it is answered rightly, and its cross entropy."""
    count, per_mosaic = len(features), question_set.questions_per_mosaic
    tokens = torch.from_numpy(question_set.questions.tokens).view(count, per_mosaic * QUESTION_TOKENS)
    lengths, answers = (
        torch.from_numpy(question_set.questions.lengths),
        torch.from_numpy(question_set.questions.answers),
    )
    layout = pack(features.shape[1], [QUESTION_TOKENS] * per_mosaic)
    logits = []
    for start in range(0, count, _MOSAICS_PER_PASS):
        rows = slice(start, start + _MOSAICS_PER_PASS)
        embedded = torch.cat([features[rows], model.get_input_embeddings()(tokens[rows])], dim=1)
        hidden, _ = text_pass(model, embedded, layout, blocks=blocks, top_k=top_k)
        by_question = hidden[:, features.shape[1] :].reshape(-1, QUESTION_TOKENS, hidden.shape[-1])
        last = lengths[start * per_mosaic : start * per_mosaic + len(by_question)] - 1
        logits.append(model.lm_head(by_question[torch.arange(len(by_question)), last]))
    scores = torch.cat(logits)
    return (scores.argmax(1) == answers).numpy(), functional.cross_entropy(scores, answers, reduction="none").numpy()


@dataclass(frozen=True)
class DropOrder:
    """Blocks in the order in which they are dropped, and the accuracy after each."""

    blocks: tuple[int, ...]
    accuracy: tuple[float, ...]
    """Of the questions it was chosen on, without a drop and after each."""


def find_drop_orders(
    model: LlavaForConditionalGeneration, question_set: QuestionSet, print_line: Callable[[str], None]
) -> dict[str, DropOrder]:
    """The order in which pretraining left blocks out, from the last one, judged on mosaics without a frame; and the
    greedy order for mosaics without a frame, for framed ones, and for all of them together.

    Each greedy step drops the block without which most questions are answered rightly, and of equals the one without
    which the loss is smallest. Blocks before the latest insertion position always run.
    """
    features = features_of(model, question_set, Tier.HIGH)
    framed = np.repeat(question_set.mosaics.framed, question_set.questions_per_mosaic)
    outcomes: dict[frozenset[int], tuple[np.ndarray, np.ndarray]] = {}

    def judge(dropped: Sequence[int], asked: np.ndarray) -> tuple[float, float]:
        """Accuracy and negative loss."""
        if frozenset(dropped) not in outcomes:
            kept = [block for block in range(BLOCKS) if block not in dropped]
            outcomes[frozenset(dropped)] = answer_losses(model, question_set, features, blocks=kept, top_k=TOP_K)
        is_right, losses = outcomes[frozenset(dropped)]
        return float(is_right[asked].mean()), -float(losses[asked].mean())

    from_the_last = tuple(reversed(range(FEWEST_BLOCKS, BLOCKS)))
    judged = [judge(from_the_last[:dropped], ~framed)[0] for dropped in range(len(from_the_last) + 1)]
    orders = {"last": DropOrder(from_the_last, tuple(round(value, 4) for value in judged))}
    print_line(f"last: {orders['last']}")
    for name, asked in {"plain": ~framed, "framed": framed, "all": np.ones_like(framed)}.items():
        dropped: list[int] = []
        accuracy = [judge(dropped, asked)[0]]
        for _ in range(BLOCKS - FEWEST_BLOCKS):
            others = [block for block in range(FIRST_DROPPABLE_BLOCK, BLOCKS) if block not in dropped]
            dropped.append(max(others, key=lambda block: judge([*dropped, block], asked)))
            accuracy.append(judge(dropped, asked)[0])
        orders[name] = DropOrder(tuple(dropped), tuple(round(value, 4) for value in accuracy))
        print_line(f"{name}: {orders[name]}")
    alone = {block: judge([block], np.ones_like(framed))[0] for block in range(FIRST_DROPPABLE_BLOCK, BLOCKS)}
    print_line(f"accuracy without one block: {', '.join(f'{block}: {value:.3f}' for block, value in alone.items())}")
    return orders


def save_drop_orders(folder: Path, orders: Mapping[str, DropOrder]) -> None:
    """Write the order that the model ships with, from the last block, and the others beside it."""
    content = {
        "drop_order": orders["last"].blocks,
        "other_drop_orders": sorted({order.blocks for order in orders.values()} - {orders["last"].blocks}),
        "measured": {name: asdict(order) for name, order in orders.items()},
        "split": "validation",
        "tier": "high",
    }
    (folder / IMPORTANCE_FILE).write_text(json.dumps(content, indent=2) + "\n")
