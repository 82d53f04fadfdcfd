"""Losses of the pretraining steps.

Alignment trains the vision tower: an image token shall equal the sum of the word embeddings for the tiles, rows and
digits that its patch shows, each times the share of the patch, and of "framed" in a framed mosaic; auxiliary heads
classify every tile. The other steps train on questions.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlavaForConditionalGeneration

from groupwise.workloads.controller.tasks.mosaic.questions import (
    FIRST_NUMBER_TOKEN,
    FIRST_ROW_TOKEN,
    FIRST_TILE_TOKEN,
    FRAMED_TOKEN,
    NONE_TOKEN,
    QUESTION_TOKENS,
    QUESTION_TYPES,
    draw_questions,
    transcribe_tiles,
)
from groupwise.workloads.controller.tasks.mosaic.scene import (
    COLUMNS,
    CROPS,
    EMPTY,
    PRINTS,
    ROWS,
    TILES,
    TOKENS_PER_CROP,
    TRAIN_JITTER,
    Handwriting,
    Mosaics,
    Tier,
    coverage,
    cut,
    draw_mosaics,
)
from tools.mosaic.curriculum import (
    Phase,
    PretrainConfig,
    StepKnobs,
    draw_knobs,
    draw_question_types,
    family_shares,
    mosaics_at,
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
    words: Float[Tensor, "vocabulary width"], features: VisionFeatures, mosaics: Mosaics, tier: Tier
) -> Float[Tensor, ""]:
    """Squared distance of image tokens to the sum of their words, in units of a word's squared length."""
    named = words[_WORDS].detach()
    tiles = coverage(tier)
    rows = tiles.view(-1, ROWS, COLUMNS).sum(2)
    positions = torch.cat([tiles, rows], dim=1).expand(len(mosaics.labels), -1, -1)
    shown = tiles @ functional.one_hot(torch.from_numpy(mosaics.labels), _LABELS).float()
    framed = torch.from_numpy(mosaics.framed).float()[:, None, None] * words[FRAMED_TOKEN].detach()
    targets = torch.cat([positions, shown], dim=2) @ named + framed
    distance = (features.projected.flatten(1, 2) - targets).square().sum(2).mean()
    return distance / named.square().sum(1).mean()


def naming_loss(
    words: Float[Tensor, "vocabulary width"], features: VisionFeatures, mosaics: Mosaics, tier: Tier
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """Cross entropy of the digits that each image token's patch shows, by the token's similarity to their words; and
    how often the tokens of crops of one tile name it rightly, by print.

    The squared distance alone is content with the mean digit: no token knows its tile's digit at first.
    """
    named = words[_WORDS[-_LABELS:]].detach()
    shown = coverage(tier) @ functional.one_hot(torch.from_numpy(mosaics.labels), _LABELS).float()
    logits = features.projected.flatten(1, 2) @ named.T * (_SHARPNESS / named.square().sum(1).mean())
    loss = -(shown * logits.log_softmax(-1)).sum(-1).mean()
    if tier is not Tier.HIGH:
        return loss, {}
    is_right = logits[:, TOKENS_PER_CROP:].argmax(-1) == shown[:, TOKENS_PER_CROP:].argmax(-1)
    by_mosaic = is_right.float().mean(1).detach().numpy()
    right = {
        f"named {style}": float(by_mosaic[mosaics.prints == index].mean())
        for index, style in enumerate(PRINTS)
        if (mosaics.prints == index).any()
    }
    return loss, right


def tile_loss(
    heads: TileHeads, features: VisionFeatures, mosaics: Mosaics, tier: Tier
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """Cross entropy of the tile heads, and the accuracy of the crops' head by print."""
    overview, crops = heads(features.tower, tier)
    targets = torch.from_numpy(mosaics.labels).flatten()
    loss = functional.cross_entropy(overview, targets) + functional.cross_entropy(crops, targets)
    is_right = (crops.argmax(1) == targets).view(len(mosaics.labels), -1).float().mean(1).numpy()
    by_print = {
        f"tiles {tier} {style}": float(is_right[mosaics.prints == index].mean())
        for index, style in enumerate(PRINTS)
        if (mosaics.prints == index).any()
    }
    return loss, by_print


_READ_WEIGHT_EARLY, _READ_WEIGHT_LATE = 0.5, 0.2
_BALANCE_WEIGHT = 0.01
_TILE_WEIGHT = 0.1
_NAMING_WEIGHT = 2.0
_NAMING_TILE_WEIGHT = 0.2
_FRAME_WEIGHT = 0.3
# Logits of words that a state names, in units of a word with itself.
_SHARPNESS = 6.0
_ALIGNMENT_TIERS = (Tier.HIGH, Tier.MEDIUM, Tier.HIGH, Tier.LOW)
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

    def freeze_before(self, block: int) -> None:
        """For the cipher phase: the blocks from this one on, the final norm and the output head are trained."""
        text = self.model.model.language_model
        self.requires_grad_(False)
        for layer in text.layers[block:]:
            layer.requires_grad_(True)
            layer.mlp.gate.weight.requires_grad_(False)
        text.norm.requires_grad_(True)
        self.model.lm_head.requires_grad_(True)


@dataclass(frozen=True)
class StepOutcome:
    """A step's loss, and fractions to log."""

    loss: Tensor
    fractions: dict[str, float]


def vision_step(learner: Learner, handwriting: Handwriting, config: PretrainConfig, step: int) -> StepOutcome:
    """One batch of alignment or naming; the tiers take turns."""
    rng = config.random(step)
    tier = _ALIGNMENT_TIERS[step % len(_ALIGNMENT_TIERS)]
    count = int(config.alignment_mosaics * _COARSER_MOSAICS[tier])
    mosaics = draw_mosaics(handwriting, count, TRAIN_JITTER, rng, family_shares(config, step, tier))
    features = encode_mosaics(learner.model, mosaics.pixels, tier)
    tiles, by_print = tile_loss(learner.heads, features, mosaics, tier)
    words = learner.model.get_input_embeddings().weight
    aligned = alignment_loss(words, features, mosaics, tier)
    if config.phase(step) is Phase.ALIGNMENT:
        return StepOutcome(loss=tiles + aligned, fractions={**by_print, "misaligned": aligned.item()})
    named, right = naming_loss(words, features, mosaics, tier)
    return StepOutcome(
        loss=_NAMING_TILE_WEIGHT * tiles + aligned + _NAMING_WEIGHT * named,
        fractions={**by_print, **right, "misaligned": aligned.item()},
    )


def reading_step(
    learner: Learner, handwriting: Handwriting, config: PretrainConfig, step: int, run_block: BlockPass
) -> StepOutcome:
    """One batch of questions, packed after their mosaic, with the transcription of all tiles and the tile heads."""
    rng = config.random(step)
    knobs = draw_knobs(config, step, rng)
    mosaics = _draw_batch(handwriting, config, step, knobs, rng)
    features = encode_mosaics(learner.model, mosaics.pixels, knobs.tier)
    tiles, fractions = tile_loss(learner.heads, features, mosaics, knobs.tier)
    types = draw_question_types(config, step, len(mosaics.labels) * config.questions_per_mosaic, rng)
    in_plain = replace(mosaics, framed=np.zeros_like(mosaics.framed))
    answered = _answer_batch(learner.model, features.projected, in_plain, types, knobs, rng, run_block)
    read_weight = _READ_WEIGHT_EARLY if config.reading_progress(step) < 0.5 else _READ_WEIGHT_LATE
    loss = answered.question_loss + read_weight * answered.read_loss + _BALANCE_WEIGHT * answered.balance
    # Otherwise the tower forgets what it has learned, before anything reads it.
    words = learner.model.get_input_embeddings().weight
    aligned, (named, right) = (
        alignment_loss(words, features, mosaics, knobs.tier),
        naming_loss(words, features, mosaics, knobs.tier),
    )
    framed = np.repeat(mosaics.framed, config.questions_per_mosaic)
    frame, frame_accuracy = _frame_loss(words, answered.last, framed)
    loss = (
        loss
        + _TILE_WEIGHT * tiles
        + _FRAME_WEIGHT * frame
        + (1 - config.reading_progress(step)) * (aligned + _NAMING_WEIGHT * named)
    )
    fractions |= {"read": answered.read_accuracy, "misaligned": aligned.item(), "frame": frame_accuracy, **right}
    return StepOutcome(loss=loss, fractions=fractions | _by_type(answered, mosaics, types, knobs))


def cipher_step(
    learner: Learner, handwriting: Handwriting, config: PretrainConfig, step: int, run_block: BlockPass
) -> StepOutcome:
    """One batch of questions for the last blocks."""
    rng = config.random(step)
    knobs = draw_knobs(config, step, rng)
    mosaics = _draw_batch(handwriting, config, step, knobs, rng)
    with torch.no_grad():
        features = encode_mosaics(learner.model, mosaics.pixels, knobs.tier)
    count = len(mosaics.labels) * config.cipher_questions_per_mosaic
    types = draw_question_types(config, step, count, rng, is_varied=knobs.is_varied)
    answered = _answer_batch(learner.model, features.projected, mosaics, types, knobs, rng, run_block)
    loss = answered.question_loss + _BALANCE_WEIGHT * answered.balance
    return StepOutcome(loss=loss, fractions=_by_type(answered, mosaics, types, knobs))


def _draw_batch(
    handwriting: Handwriting, config: PretrainConfig, step: int, knobs: StepKnobs, rng: np.random.Generator
) -> Mosaics:
    count = int(mosaics_at(config, step) * _COARSER_MOSAICS[knobs.tier])
    fractions = family_shares(config, step, knobs.tier, is_varied=knobs.is_varied)
    return draw_mosaics(handwriting, count, TRAIN_JITTER, rng, fractions)


@dataclass(frozen=True)
class _Answered:
    question_loss: Tensor
    read_loss: Tensor
    balance: Tensor
    last: Float[Tensor, "questions width"]
    """The normed states that the answers come from."""
    is_right: np.ndarray
    read_accuracy: float


def _by_type(answered: _Answered, mosaics: Mosaics, types: np.ndarray, knobs: StepKnobs) -> dict[str, float]:
    """Accuracies of readable mosaics to log: by question type at the high tier, over all types elsewhere."""
    per_mosaic = len(types) // len(mosaics.labels)
    framed, prints = np.repeat(mosaics.framed, per_mosaic), np.repeat(mosaics.prints, per_mosaic)
    fractions = {}
    for index, style in enumerate(PRINTS):
        for is_framed in (False, True):
            if (inside := (prints == index) & (framed == is_framed)).any():
                prefix = "varied" if knobs.is_varied else "all"
                name = f"{prefix} {knobs.tier} {style}{' framed' if is_framed else ''}"
                fractions[name] = float(answered.is_right[inside].mean())
    if knobs.tier is Tier.HIGH and not knobs.is_varied:
        for index, question_type in enumerate(QUESTION_TYPES):
            if (of_type := types == index).any():
                fractions[f"high {question_type}"] = float(answered.is_right[of_type].mean())
    return fractions


def _frame_loss(
    words: Float[Tensor, "vocabulary width"],
    states: Float[Tensor, "questions width"],
    framed: Bool[np.ndarray, " questions"],
) -> tuple[Float[Tensor, ""], float]:
    """Cross entropy of the frame by the similarity of states to the word "framed", and how often they are right.

    Nothing else in reading asks for the frame, and the last blocks would have to look for it first.
    """
    word, target = words[FRAMED_TOKEN].detach(), torch.from_numpy(framed).float()
    logits = _SHARPNESS * (states @ word / word.square().sum() - 0.5)
    is_right = ((logits > 0) == (target > 0)).float().mean().item()
    return functional.binary_cross_entropy_with_logits(logits, target), is_right


def _answer_batch(
    model: LlavaForConditionalGeneration,
    features: Tensor,
    mosaics: Mosaics,
    types: np.ndarray,
    knobs: StepKnobs,
    rng: np.random.Generator,
    run_block: BlockPass,
) -> _Answered:
    count, per_mosaic = len(mosaics.labels), len(types) // len(mosaics.labels)
    labels, framed = (np.repeat(of_mosaic, per_mosaic, axis=0) for of_mosaic in (mosaics.labels, mosaics.framed))
    questions = draw_questions(labels, framed, types, rng)
    read_inputs, read_targets = transcribe_tiles(mosaics.labels)
    tokens = np.concatenate([questions.tokens.reshape(count, -1), read_inputs], axis=1)
    embedded = model.get_input_embeddings()(torch.from_numpy(tokens))
    prefix = features.flatten(1, 2)
    packing = pack(prefix.shape[1], [QUESTION_TOKENS] * per_mosaic + [TILES])
    hidden, balance = text_pass(
        model,
        torch.cat([prefix, embedded], dim=1),
        packing,
        blocks=range(knobs.blocks),
        top_k=knobs.top_k,
        insertion_position=knobs.insertion_position,
        run_block=run_block,
    )

    def last_tokens(states: Tensor) -> Tensor:
        by_question = states[:, prefix.shape[1] : -TILES].reshape(count * per_mosaic, QUESTION_TOKENS, -1)
        return by_question[torch.arange(count * per_mosaic), torch.from_numpy(questions.lengths - 1)]

    last = last_tokens(hidden)
    logits, read_logits = model.lm_head(last), model.lm_head(hidden[:, -TILES:].flatten(0, 1))
    answers, read_answers = torch.from_numpy(questions.answers), torch.from_numpy(read_targets).flatten()
    return _Answered(
        question_loss=functional.cross_entropy(logits, answers),
        read_loss=functional.cross_entropy(read_logits, read_answers),
        balance=balance,
        last=last,
        is_right=(logits.argmax(1) == answers).numpy(),
        read_accuracy=(read_logits.argmax(1) == read_answers).float().mean().item(),
    )
