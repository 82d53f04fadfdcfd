"""Which blocks the model misses least: measured on validation handwriting, stored beside the weights.
Answers of the model to a fixed set of questions, at any setting.
"""

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
from tools.mosaic.losses import see

_MOSAICS_PER_PASS = 25


@torch.no_grad()
def features_of(
    model: LlavaForConditionalGeneration, exam: QuestionSet, tier: Tier
) -> Float[Tensor, "mosaics tokens width"]:
    """Return what the text model sees of each mosaic: it depends on the tier alone."""
    parts = exam.mosaics.pixels.split(_MOSAICS_PER_PASS)
    return torch.cat([see(model, part, tier).projected.flatten(1, 2) for part in parts])


@torch.no_grad()
def answer_losses(
    model: LlavaForConditionalGeneration,
    exam: QuestionSet,
    features: Float[Tensor, "mosaics tokens width"],
    *,
    blocks: Sequence[int],
    top_k: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return for each question of the exam whether it is answered rightly, and its cross entropy."""
    count, asked = len(features), exam.questions_per_mosaic
    tokens = torch.from_numpy(exam.questions.tokens).view(count, asked * QUESTION_TOKENS)
    lengths, answers = torch.from_numpy(exam.questions.lengths), torch.from_numpy(exam.questions.answers)
    packing = pack(features.shape[1], [QUESTION_TOKENS] * asked)
    logits = []
    for start in range(0, count, _MOSAICS_PER_PASS):
        rows = slice(start, start + _MOSAICS_PER_PASS)
        embedded = torch.cat([features[rows], model.get_input_embeddings()(tokens[rows])], dim=1)
        hidden, _ = text_pass(model, embedded, packing, blocks=blocks, top_k=top_k)
        by_question = hidden[:, features.shape[1] :].reshape(-1, QUESTION_TOKENS, hidden.shape[-1])
        last = lengths[start * asked : start * asked + len(by_question)] - 1
        logits.append(model.lm_head(by_question[torch.arange(len(by_question)), last]))
    scores = torch.cat(logits)
    return (scores.argmax(1) == answers).numpy(), functional.cross_entropy(scores, answers, reduction="none").numpy()


def measure_importance(
    model: LlavaForConditionalGeneration, exam: QuestionSet, say: Callable[[str], None]
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
    (folder / IMPORTANCE_FILE).write_text(json.dumps(content, indent=2) + "\n")
    return order
