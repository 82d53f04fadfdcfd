"""Teach the vision tower to speak in words: an image token should be the sum of the words for what its patch shows.

The words are those of the tiles, rows and digits there, each times the share of the patch that shows it. Beside it,
heads that exist only in training must tell every tile from the tower's output for one crop.
The two kinds of pretraining step: align the vision tower with words, then train the whole model on questions.
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
    KINDS,
    NONE_TOKEN,
    QUESTION_TOKENS,
    Kind,
    Questions,
    ask,
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
    draw_kinds,
    draw_knobs,
    famous_names_at,
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
class Seen:
    """What the vision tower makes of the crops, and what the projector makes of that for the text model."""

    tower: Float[Tensor, "mosaics crops tokens vision_width"]
    projected: Float[Tensor, "mosaics crops tokens width"]


def see(model: LlavaForConditionalGeneration, pixels: Float[Tensor, "mosaics height width"], tier: Tier) -> Seen:
    """Look at all crops of these mosaics."""
    crops = cut(pixels, tier)
    found = model.model.get_image_features(pixel_values=crops.flatten(0, 1))
    projected = torch.stack(list(found.pooler_output))
    return Seen(found.hidden_states[-1].unflatten(0, crops.shape[:2]), projected.unflatten(0, crops.shape[:2]))


class TileHeads(nn.Module):
    """Tell the label of each tile a crop covers from the tower's output for that crop."""

    def __init__(self, vision_width: int) -> None:
        super().__init__()
        features = TOKENS_PER_CROP * vision_width
        self.overview = nn.Linear(features, TILES * _LABELS)
        self.crop = nn.ModuleDict({tier: nn.Linear(features, TILES // CROPS[tier] * _LABELS) for tier in Tier})

    def forward(
        self, tower: Float[Tensor, "mosaics crops tokens vision_width"], tier: Tier
    ) -> tuple[Float[Tensor, "all_tiles labels"], Float[Tensor, "all_tiles labels"]]:
        """Return the logits of all tiles of all mosaics, from the overview and from the crops."""
        by_crop = tower.flatten(2)
        crops = self.crop[tier](by_crop[:, 1:])
        return self.overview(by_crop[:, 0]).view(-1, _LABELS), crops.reshape(-1, _LABELS)


def alignment_loss(
    words: Float[Tensor, "vocabulary width"], seen: Seen, labels: Int[np.ndarray, "mosaics tiles"], tier: Tier
) -> Float[Tensor, ""]:
    """Return the squared distance of image tokens to the sum of their words, in units of a word's squared length."""
    named = words[_WORDS].detach()
    tiles = coverage(tier)
    rows = tiles.view(-1, ROWS, COLUMNS).sum(2)
    places = torch.cat([tiles, rows], dim=1).expand(len(labels), -1, -1)
    shown = tiles @ functional.one_hot(torch.from_numpy(labels), _LABELS).float()
    wanted = torch.cat([places, shown], dim=2) @ named
    distance = (seen.projected.flatten(1, 2) - wanted).square().sum(2).mean()
    return distance / named.square().sum(1).mean()


def tile_loss(
    heads: TileHeads, seen: Seen, labels: Int[np.ndarray, "mosaics tiles"], tier: Tier
) -> tuple[Float[Tensor, ""], float]:
    """Return the cross entropy of the tile heads, and the share of tiles that the crops' head got right."""
    overview, crops = heads(seen.tower, tier)
    targets = torch.from_numpy(labels).flatten()
    loss = functional.cross_entropy(overview, targets) + functional.cross_entropy(crops, targets)
    return loss, (crops.argmax(1) == targets).float().mean().item()


_READ_WEIGHT_EARLY, _READ_WEIGHT_LATE = 0.5, 0.2
_BALANCE_WEIGHT = 0.01
_TILE_WEIGHT = 0.1
_ALIGNMENT_TIERS = (Tier.HIGH, Tier.MEDIUM, Tier.HIGH, Tier.LOW)
Asking = Callable[[np.ndarray, np.ndarray], Questions]
"""(labels, kinds) -> questions."""
_COARSER_MOSAICS = {Tier.HIGH: 1.0, Tier.MEDIUM: 1.25, Tier.LOW: 1.5}


class Learner(nn.Module):
    """The model and the heads that only training needs.

    Routing stays as it was drawn (as in hash layers, Roller et al., 2021): a learned one puts the useful experts first,
    and the last of the top-k then carry next to nothing.
    """

    def __init__(self, model: LlavaForConditionalGeneration) -> None:
        super().__init__()
        self.model = model
        for block in model.model.language_model.layers:
            block.mlp.gate.weight.requires_grad_(False)
        self.heads = TileHeads(model.config.vision_config.hidden_size)


@dataclass(frozen=True)
class Outcome:
    """A step's loss, and the shares that are worth watching."""

    loss: Tensor
    shares: dict[str, float]


def alignment_step(learner: Learner, handwriting: Handwriting, plan: PretrainConfig, step: int) -> Outcome:
    """Return the loss of one batch for the vision tower; the tiers take turns."""
    rng = plan.random(step)
    tier = _ALIGNMENT_TIERS[step % len(_ALIGNMENT_TIERS)]
    mosaics = draw_mosaics(handwriting, int(plan.alignment_mosaics * _COARSER_MOSAICS[tier]), TRAIN_JITTER, rng)
    seen = see(learner.model, mosaics.pixels, tier)
    tiles, right = tile_loss(learner.heads, seen, mosaics.labels, tier)
    aligned = alignment_loss(learner.model.get_input_embeddings().weight, seen, mosaics.labels, tier)
    return Outcome(loss=tiles + aligned, shares={f"tiles {tier}": right, "misaligned": aligned.item()})


def text_step(
    learner: Learner, handwriting: Handwriting, plan: PretrainConfig, step: int, run_block: BlockPass
) -> Outcome:
    """Return the loss of one batch of questions, packed after their mosaic, with "read aloud" and tiles beside it."""
    rng = plan.random(step)
    knobs = draw_knobs(plan, step, rng)
    count = int(mosaics_at(plan, step) * _COARSER_MOSAICS[knobs.tier])
    mosaics = draw_mosaics(handwriting, count, TRAIN_JITTER, rng)
    seen = see(learner.model, mosaics.pixels, knobs.tier)
    tiles, right = tile_loss(learner.heads, seen, mosaics.labels, knobs.tier)
    is_full = len(knobs.blocks) == plan.size.blocks and knobs.top_k == plan.size.top_k
    kinds = draw_kinds(plan, step, count * plan.questions_per_mosaic, rng, by_heart=is_full)
    asking = partial(ask, rng=rng, famous_names=famous_names_at(plan, step))
    answered = _answer_batch(learner.model, seen.projected, mosaics.labels, kinds, knobs, asking, run_block)
    recited, recited_right = _recite(learner.model, recited_at(plan, step) if is_full else 0, knobs, asking, run_block)
    read_weight = _READ_WEIGHT_EARLY if plan.text_progress(step) < 0.4 else _READ_WEIGHT_LATE
    loss = answered.question_loss + read_weight * answered.read_loss + _BALANCE_WEIGHT * answered.balance
    loss = loss + recite_weight(plan, step) * recited
    shares = {f"tiles {knobs.tier}": right, "read": answered.read_right}
    if recited_right is not None:
        shares["recited"] = recited_right
    prefix = f"{knobs.tier}" if is_full else "varied"
    for number, kind in enumerate(KINDS):
        if (asked := answered.kinds == number).any():
            shares[f"{prefix} {kind}"] = float(answered.right[asked].mean())
    return Outcome(loss=loss + _TILE_WEIGHT * tiles, shares=shares)


@dataclass(frozen=True)
class _Answered:
    question_loss: Tensor
    read_loss: Tensor
    balance: Tensor
    kinds: np.ndarray
    right: np.ndarray
    read_right: float


def _answer_batch(
    model: LlavaForConditionalGeneration,
    features: Tensor,
    labels: np.ndarray,
    kinds: np.ndarray,
    knobs: StepKnobs,
    asking: Asking,
    run_block: BlockPass,
) -> _Answered:
    count, asked = len(labels), len(kinds) // len(labels)
    questions = asking(np.repeat(labels, asked, axis=0), kinds)
    said, targets = transcribe_tiles(labels)
    words = np.concatenate([questions.tokens.reshape(count, -1), said], axis=1)
    embedded = model.get_input_embeddings()(torch.from_numpy(words))
    prefix = features.flatten(1, 2)
    packing = pack(prefix.shape[1], [QUESTION_TOKENS] * asked + [TILES])
    hidden, balance = text_pass(
        model,
        torch.cat([prefix, embedded], dim=1),
        packing,
        blocks=knobs.blocks,
        top_k=knobs.top_k,
        insertion_position=knobs.insertion_position,
        run_block=run_block,
    )
    by_question = hidden[:, prefix.shape[1] : -TILES].reshape(count * asked, QUESTION_TOKENS, -1)
    last = by_question[torch.arange(count * asked), torch.from_numpy(questions.lengths - 1)]
    logits, read_logits = model.lm_head(last), model.lm_head(hidden[:, -TILES:].flatten(0, 1))
    answers, read_targets = torch.from_numpy(questions.answers), torch.from_numpy(targets).flatten()
    return _Answered(
        question_loss=functional.cross_entropy(logits, answers),
        read_loss=functional.cross_entropy(read_logits, read_targets),
        balance=balance,
        kinds=kinds,
        right=(logits.argmax(1) == answers).numpy(),
        read_right=(read_logits.argmax(1) == read_targets).float().mean().item(),
    )


def _recite(
    model: LlavaForConditionalGeneration, count: int, knobs: StepKnobs, asking: Asking, run_block: BlockPass
) -> tuple[Tensor | float, float | None]:
    """Return the loss of so many facts and lore without a mosaic, and the share that is known."""
    if not count:
        return 0.0, None
    kinds = np.resize([KINDS.index(Kind.FACT), KINDS.index(Kind.LORE)], count)
    questions = asking(np.zeros((count, TILES), np.int64), kinds)
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
