"""Losses of the two kinds of pretraining step.

Alignment trains the vision tower: an image token shall equal the sum of the word embeddings for the tiles, rows and
digits that its patch shows, each times the share of the patch; auxiliary heads classify every tile. Text steps train
the whole model on questions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlavaForConditionalGeneration

from groupwise.workloads.controller.tasks.mosaic.questions import (
    FIRST_NUMBER_TOKEN,
    FIRST_ROW_TOKEN,
    FIRST_TILE_TOKEN,
    NONE_TOKEN,
    QUESTION_TOKENS,
    QUESTION_TYPES,
    Questions,
    QuestionType,
    draw_questions,
    transcribe_tiles,
)
from groupwise.workloads.controller.tasks.mosaic.scene import (
    COLUMNS,
    CROPS,
    EMPTY,
    ROWS,
    TILES,
    TOKENS_PER_CROP,
    TRAIN_JITTER,
    Handwriting,
    Tier,
    coverage,
    cut,
    draw_mosaics,
)
from tools.mosaic.curriculum import (
    PretrainConfig,
    StepKnobs,
    draw_knobs,
    draw_question_types,
    frequent_names_at,
    mosaics_at,
    recite_weight,
    recited_at,
)
from tools.mosaic.dense_forward import BlockPass, pack, text_pass

_LABELS = EMPTY + 1
_WORDS = [
    *range(FIRST_TILE_TOKEN, FIRST_TILE_TOKEN + TILES),
    *range(FIRST_ROW_TOKEN, FIRST_ROW_TOKEN + ROWS),
    *range(FIRST_NUMBER_TOKEN, FIRST_NUMBER_TOKEN + EMPTY),
    NONE_TOKEN,
]


@dataclass(frozen=True)
class VisionFeatures:
    """Outputs of the vision tower and of the projector."""

    tower: Float[Tensor, "mosaics crops tokens vision_width"]
    projected: Float[Tensor, "mosaics crops tokens width"]


def encode_mosaics(
    model: LlavaForConditionalGeneration, pixels: Float[Tensor, "mosaics height width"], tier: Tier
) -> VisionFeatures:
    """Encode all crops of these mosaics."""
    crops = cut(pixels, tier)
    outputs = model.model.get_image_features(pixel_values=crops.flatten(0, 1))
    projected = torch.stack(list(outputs.pooler_output))
    return VisionFeatures(
        outputs.hidden_states[-1].unflatten(0, crops.shape[:2]), projected.unflatten(0, crops.shape[:2])
    )


class TileHeads(nn.Module):
    """Auxiliary classifiers: the label of each tile from the tower's output for one crop."""

    def __init__(self, vision_width: int) -> None:
        super().__init__()
        features = TOKENS_PER_CROP * vision_width
        self.overview = nn.Linear(features, TILES * _LABELS)
        self.crop = nn.ModuleDict({tier: nn.Linear(features, TILES // CROPS[tier] * _LABELS) for tier in Tier})

    def forward(
        self, tower: Float[Tensor, "mosaics crops tokens vision_width"], tier: Tier
    ) -> tuple[Float[Tensor, "all_tiles labels"], Float[Tensor, "all_tiles labels"]]:
        """Logits of all tiles of all mosaics, from the overview and from the crops."""
        by_crop = tower.flatten(2)
        crops = self.crop[tier](by_crop[:, 1:])
        return self.overview(by_crop[:, 0]).view(-1, _LABELS), crops.reshape(-1, _LABELS)


def alignment_loss(
    words: Float[Tensor, "vocabulary width"],
    features: VisionFeatures,
    labels: Int[np.ndarray, "mosaics tiles"],
    tier: Tier,
) -> Float[Tensor, ""]:
    """Squared distance of image tokens to the sum of their words, in units of a word's squared length."""
    named = words[_WORDS].detach()
    tiles = coverage(tier)
    rows = tiles.view(-1, ROWS, COLUMNS).sum(2)
    positions = torch.cat([tiles, rows], dim=1).expand(len(labels), -1, -1)
    shown = tiles @ functional.one_hot(torch.from_numpy(labels), _LABELS).float()
    targets = torch.cat([positions, shown], dim=2) @ named
    distance = (features.projected.flatten(1, 2) - targets).square().sum(2).mean()
    return distance / named.square().sum(1).mean()


def tile_loss(
    heads: TileHeads, features: VisionFeatures, labels: Int[np.ndarray, "mosaics tiles"], tier: Tier
) -> tuple[Float[Tensor, ""], float]:
    """Cross entropy of the tile heads, and the accuracy of the crops' head."""
    overview, crops = heads(features.tower, tier)
    targets = torch.from_numpy(labels).flatten()
    loss = functional.cross_entropy(overview, targets) + functional.cross_entropy(crops, targets)
    return loss, (crops.argmax(1) == targets).float().mean().item()


_READ_WEIGHT_EARLY, _READ_WEIGHT_LATE = 0.5, 0.2
_BALANCE_WEIGHT = 0.01
_TILE_WEIGHT = 0.1
_ALIGNMENT_TIERS = (Tier.HIGH, Tier.MEDIUM, Tier.HIGH, Tier.LOW)
QuestionDrawer = Callable[[np.ndarray, np.ndarray], Questions]
"""(labels, question types) -> questions."""
_COARSER_MOSAICS = {Tier.HIGH: 1.0, Tier.MEDIUM: 1.25, Tier.LOW: 1.5}


class Learner(nn.Module):
    """The model and the auxiliary heads.

    Routers keep their random weights (as in hash layers, Roller et al., 2021): learned ones put the useful experts
    first, and the last of the top-k then contribute next to nothing.
    """

    def __init__(self, model: LlavaForConditionalGeneration) -> None:
        super().__init__()
        self.model = model
        for block in model.model.language_model.layers:
            block.mlp.gate.weight.requires_grad_(False)
        self.heads = TileHeads(model.config.vision_config.hidden_size)


@dataclass(frozen=True)
class StepOutcome:
    """A step's loss, and fractions to log."""

    loss: Tensor
    fractions: dict[str, float]


def alignment_step(learner: Learner, handwriting: Handwriting, config: PretrainConfig, step: int) -> StepOutcome:
    """One alignment batch; the tiers take turns."""
    rng = config.random(step)
    tier = _ALIGNMENT_TIERS[step % len(_ALIGNMENT_TIERS)]
    mosaics = draw_mosaics(handwriting, int(config.alignment_mosaics * _COARSER_MOSAICS[tier]), TRAIN_JITTER, rng)
    features = encode_mosaics(learner.model, mosaics.pixels, tier)
    tiles, right = tile_loss(learner.heads, features, mosaics.labels, tier)
    aligned = alignment_loss(learner.model.get_input_embeddings().weight, features, mosaics.labels, tier)
    return StepOutcome(loss=tiles + aligned, fractions={f"tiles {tier}": right, "misaligned": aligned.item()})


def text_step(
    learner: Learner, handwriting: Handwriting, config: PretrainConfig, step: int, run_block: BlockPass
) -> StepOutcome:
    """One batch of questions, packed after their mosaic, with the transcription of all tiles and the tile heads."""
    rng = config.random(step)
    knobs = draw_knobs(config, step, rng)
    count = int(mosaics_at(config, step) * _COARSER_MOSAICS[knobs.tier])
    mosaics = draw_mosaics(handwriting, count, TRAIN_JITTER, rng)
    features = encode_mosaics(learner.model, mosaics.pixels, knobs.tier)
    tiles, right = tile_loss(learner.heads, features, mosaics.labels, knobs.tier)
    is_full = len(knobs.blocks) == config.size.blocks and knobs.top_k == config.size.top_k
    types = draw_question_types(config, step, count * config.questions_per_mosaic, rng, memorized=is_full)
    draw = partial(draw_questions, rng=rng, frequent_names=frequent_names_at(config, step))
    answered = _answer_batch(learner.model, features.projected, mosaics.labels, types, knobs, draw, run_block)
    recited, recited_accuracy = _recite(
        learner.model, recited_at(config, step) if is_full else 0, knobs, draw, run_block
    )
    read_weight = _READ_WEIGHT_EARLY if config.text_progress(step) < 0.4 else _READ_WEIGHT_LATE
    loss = answered.question_loss + read_weight * answered.read_loss + _BALANCE_WEIGHT * answered.balance
    loss = loss + recite_weight(config, step) * recited
    fractions = {f"tiles {knobs.tier}": right, "read": answered.read_accuracy}
    if recited_accuracy is not None:
        fractions["recited"] = recited_accuracy
    prefix = f"{knobs.tier}" if is_full else "varied"
    for index, question_type in enumerate(QUESTION_TYPES):
        if (of_type := types == index).any():
            fractions[f"{prefix} {question_type}"] = float(answered.is_right[of_type].mean())
    return StepOutcome(loss=loss + _TILE_WEIGHT * tiles, fractions=fractions)


@dataclass(frozen=True)
class _Answered:
    question_loss: Tensor
    read_loss: Tensor
    balance: Tensor
    is_right: np.ndarray
    read_accuracy: float


def _answer_batch(
    model: LlavaForConditionalGeneration,
    features: Tensor,
    labels: np.ndarray,
    types: np.ndarray,
    knobs: StepKnobs,
    draw: QuestionDrawer,
    run_block: BlockPass,
) -> _Answered:
    count, per_mosaic = len(labels), len(types) // len(labels)
    questions = draw(np.repeat(labels, per_mosaic, axis=0), types)
    read_inputs, read_targets = transcribe_tiles(labels)
    tokens = np.concatenate([questions.tokens.reshape(count, -1), read_inputs], axis=1)
    embedded = model.get_input_embeddings()(torch.from_numpy(tokens))
    prefix = features.flatten(1, 2)
    packing = pack(prefix.shape[1], [QUESTION_TOKENS] * per_mosaic + [TILES])
    hidden, balance = text_pass(
        model,
        torch.cat([prefix, embedded], dim=1),
        packing,
        blocks=knobs.blocks,
        top_k=knobs.top_k,
        insertion_position=knobs.insertion_position,
        run_block=run_block,
    )
    by_question = hidden[:, prefix.shape[1] : -TILES].reshape(count * per_mosaic, QUESTION_TOKENS, -1)
    last = by_question[torch.arange(count * per_mosaic), torch.from_numpy(questions.lengths - 1)]
    logits, read_logits = model.lm_head(last), model.lm_head(hidden[:, -TILES:].flatten(0, 1))
    answers, read_answers = torch.from_numpy(questions.answers), torch.from_numpy(read_targets).flatten()
    return _Answered(
        question_loss=functional.cross_entropy(logits, answers),
        read_loss=functional.cross_entropy(read_logits, read_answers),
        balance=balance,
        is_right=(logits.argmax(1) == answers).numpy(),
        read_accuracy=(read_logits.argmax(1) == read_answers).float().mean().item(),
    )


def _recite(
    model: LlavaForConditionalGeneration, count: int, knobs: StepKnobs, draw: QuestionDrawer, run_block: BlockPass
) -> tuple[Tensor | float, float | None]:
    """Loss and accuracy of `count` facts and lore without a mosaic."""
    if not count:
        return 0.0, None
    types = np.resize([QUESTION_TYPES.index(QuestionType.FACT), QUESTION_TYPES.index(QuestionType.LORE)], count)
    questions = draw(np.zeros((count, TILES), np.int64), types)
    hidden, _ = text_pass(
        model,
        model.get_input_embeddings()(torch.from_numpy(questions.tokens)),
        pack(0, [QUESTION_TOKENS]),
        blocks=knobs.blocks,
        top_k=knobs.top_k,
        insertion_position=knobs.insertion_position,
        run_block=run_block,
    )
    logits, answers = model.lm_head(hidden[:, -1]), torch.from_numpy(questions.answers)
    return functional.cross_entropy(logits, answers), (logits.argmax(1) == answers).float().mean().item()
