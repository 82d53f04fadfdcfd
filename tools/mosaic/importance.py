"""Which blocks the model misses least: the added loss without each of them, on validation handwriting."""

import json
from collections.abc import Callable, Sequence
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


def measure_importance(
    model: LlavaForConditionalGeneration, question_set: QuestionSet, print_line: Callable[[str], None]
) -> dict[int, float]:
    """What dropping each block alone adds to the mean loss, the least important block first.

    Blocks before the latest insertion position always run.
    """
    features = features_of(model, question_set, Tier.HIGH)

    def loss_without(dropped: int | None) -> float:
        kept = [block for block in range(BLOCKS) if block != dropped]
        return float(answer_losses(model, question_set, features, blocks=kept, top_k=TOP_K)[1].mean())

    whole = loss_without(None)
    added = {block: round(loss_without(block) - whole, 4) for block in range(FIRST_DROPPABLE_BLOCK, BLOCKS)}
    order = sorted(added, key=added.__getitem__)
    print_line(
        f"loss {whole:.3f}; added by dropping a block: {', '.join(f'{block}: {added[block]:.3f}' for block in order)}"
    )
    return {block: added[block] for block in order}


def save_importance(folder: Path, added: dict[int, float]) -> list[int]:
    """Write the measurements and the drop order that follows from them; return the order."""
    order = list(added)[: BLOCKS - FEWEST_BLOCKS]
    content = {"drop_order": order, "loss_added_by_dropping_alone": added, "split": "validation", "tier": "high"}
    (folder / IMPORTANCE_FILE).write_text(json.dumps(content, indent=2) + "\n")
    return order
