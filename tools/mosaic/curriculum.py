"""The curriculum: what pretraining does at which step, as a pure function of the config and the step.

    alignment   the vision tower learns to read its crops, and image tokens where they are
    naming      each image token learns to name the digit of its tile
    reading     the first 8 blocks learn to answer, and to say whether there is a frame, which changes no answer yet
    cipher      the last 4 blocks learn codes and cipher, all else is frozen; some steps have no frames, and leave out
                some of these

So a framed mosaic and a code need all blocks, and other questions can do without the last 4.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from groupwise.workloads.controller.tasks.mosaic.model import (
    BLOCKS,
    FEWEST_BLOCKS,
    FIRST_DROPPABLE_BLOCK,
    SMALLEST_TOP_K,
    MosaicSize,
)
from groupwise.workloads.controller.tasks.mosaic.questions import QUESTION_TYPES, QuestionType
from groupwise.workloads.controller.tasks.mosaic.scene import FamilyShares, Print, Tier

_EARLY_TYPE_SHARES = {
    QuestionType.EMPTY: 0.05,
    QuestionType.BLANKS: 0.07,
    QuestionType.DIGIT: 0.16,
    QuestionType.LARGEST: 0.12,
    QuestionType.COUNT: 0.15,
    QuestionType.TIMES: 0.1,
    QuestionType.SUM: 0.15,
    QuestionType.HOP: 0.2,
    QuestionType.CODE: 0.0,
}
_LATER_TYPE_SHARES = {
    QuestionType.EMPTY: 0.03,
    QuestionType.BLANKS: 0.05,
    QuestionType.DIGIT: 0.09,
    QuestionType.LARGEST: 0.13,
    QuestionType.COUNT: 0.22,
    QuestionType.TIMES: 0.16,
    QuestionType.SUM: 0.16,
    QuestionType.HOP: 0.16,
    QuestionType.CODE: 0.0,
}
_CIPHER_TYPE_SHARES = {
    QuestionType.EMPTY: 0.02,
    QuestionType.BLANKS: 0.06,
    QuestionType.DIGIT: 0.12,
    QuestionType.LARGEST: 0.12,
    QuestionType.COUNT: 0.16,
    QuestionType.TIMES: 0.13,
    QuestionType.SUM: 0.16,
    QuestionType.HOP: 0.12,
    QuestionType.CODE: 0.11,
}
_TIERS = tuple(Tier)
_TIER_SHARES = (0.27, 0.28, 0.45)
# Some of what a tier cannot show, too: the model shall guess well there.
_PRINT_SHARES = {
    Tier.LOW: {Print.BOLD: 0.8, Print.COARSE: 0.1, Print.FINE: 0.1},
    Tier.MEDIUM: {Print.BOLD: 0.35, Print.COARSE: 0.55, Print.FINE: 0.1},
    Tier.HIGH: {Print.BOLD: 0.25, Print.COARSE: 0.25, Print.FINE: 0.5},
}
_WARM_UP_STEPS = 40
# Fractions of the reading horizon. Finding a tile is learned by then: smaller batches, more hard questions.
_TILES_ARE_FOUND = 0.25
# Experts are left out in some steps.
_KNOBS_VARY_FROM = 0.35


class Phase(StrEnum):
    ALIGNMENT = "alignment"
    NAMING = "naming"
    READING = "reading"
    CIPHER = "cipher"


_VISION_PHASES = (Phase.ALIGNMENT, Phase.NAMING)


@dataclass(frozen=True)
class PretrainConfig:
    """Everything a pretraining run depends on."""

    size: MosaicSize = field(default_factory=MosaicSize)
    seed: int = 0
    alignment_steps: int = 700
    naming_steps: int = 600
    alignment_mosaics: int = 48
    """Also of naming."""
    reading_steps: int = 2000
    reading_horizon: int = 1200
    """The stages of reading are fractions of this many steps."""
    cipher_steps: int = 2200
    cipher_blocks: int = 4
    """The last so many blocks learn the cipher, those before them to read. Reading needs no more."""
    learning_rate: float = 2e-3
    cool_down: float = 0.4
    """Last fraction of the reading and cipher phases, in which the learning rate falls linearly."""
    early_mosaics: int = 16
    mosaics: int = 10
    vision_share: float = 0.2
    """Learning rate of the vision tower in the reading phase, as a fraction of the others'."""
    questions_per_mosaic: int = 24
    cipher_questions_per_mosaic: int = 40
    varied_share: float = 0.3
    """Fraction of the later steps that run with a smaller top-k, in the cipher phase also with fewer of the last
    blocks. They have no cipher and no codes: reading tiles shall survive these knobs."""
    framed_share: float = 0.5
    cipher_framed_share: float = 0.65

    @property
    def steps(self) -> int:
        return sum(length for _, length in self._spans().values())

    @property
    def reading_blocks(self) -> int:
        """The first so many blocks read."""
        return self.size.blocks - self.cipher_blocks

    @property
    def fewest_blocks(self) -> int:
        return self.size.blocks - (BLOCKS - FEWEST_BLOCKS)

    def random(self, step: int) -> np.random.Generator:
        """The random numbers of this step, independent of all other steps."""
        return np.random.default_rng([self.seed, step])

    def phase(self, step: int) -> Phase:
        return next(phase for phase, (first, length) in self._spans().items() if step < first + length)

    def progress(self, step: int) -> float:
        """From 0 at the start of the step's phase to 1 at its end."""
        first, length = self._spans()[self.phase(step)]
        return (step - first) / length

    def reading_progress(self, step: int) -> float:
        """The same by the horizon of reading; 1 after it."""
        first, _ = self._spans()[Phase.READING]
        return min(1.0, (step - first) / self.reading_horizon)

    def learning_rate_at(self, step: int) -> float:
        """A ramp and a cosine for the vision tower; then, in each phase, a ramp, a hold and a cool-down."""
        progress, (first, _) = self.progress(step), self._spans()[self.phase(step)]
        ramp = min(1.0, (step - first + 1) / _WARM_UP_STEPS)
        if self.phase(step) in _VISION_PHASES:
            return self.learning_rate * ramp * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * progress)))
        return self.learning_rate * ramp * min(1.0, (1 - progress) / self.cool_down)

    def vision_learning_rate_at(self, step: int) -> float:
        share = 1.0 if self.phase(step) in _VISION_PHASES else self.vision_share
        return self.learning_rate_at(step) * share

    def _spans(self) -> dict[Phase, tuple[int, int]]:
        """First step and number of steps of each phase."""
        lengths = (self.alignment_steps, self.naming_steps, self.reading_steps, self.cipher_steps)
        firsts = np.cumsum([0, *lengths[:-1]]).tolist()
        return dict(zip(Phase, zip(firsts, lengths, strict=True), strict=True))


@dataclass(frozen=True)
class StepKnobs:
    """The configuration one training step runs with."""

    tier: Tier
    blocks: int
    """The first so many run."""
    top_k: int
    insertion_position: int = 1
    is_varied: bool = False


def draw_knobs(config: PretrainConfig, step: int, rng: np.random.Generator) -> StepKnobs:
    """A random tier, and in some steps a random top-k and, in the cipher phase, fewer of the last blocks."""
    tier = _TIERS[rng.choice(len(_TIERS), p=_TIER_SHARES)]
    is_reading = config.phase(step) is Phase.READING
    blocks = config.reading_blocks if is_reading else config.size.blocks
    is_varied = rng.random() < config.varied_share
    if not is_varied or (is_reading and config.reading_progress(step) < _KNOBS_VARY_FROM):
        return StepKnobs(tier, blocks, config.size.top_k)
    return StepKnobs(
        tier,
        int(rng.integers(min(blocks, config.fewest_blocks), blocks + 1)),
        top_k=int(rng.integers(SMALLEST_TOP_K, config.size.top_k + 1)),
        insertion_position=int(rng.integers(1, FIRST_DROPPABLE_BLOCK + 1)),
        is_varied=True,
    )


def family_shares(config: PretrainConfig, step: int, tier: Tier, *, is_varied: bool = False) -> FamilyShares:
    """How often each family is drawn."""
    framed = config.framed_share
    if config.phase(step) is Phase.CIPHER:
        framed = 0.0 if is_varied else config.cipher_framed_share
    return {
        (style, is_framed): share * (framed if is_framed else 1 - framed)
        for style, share in _PRINT_SHARES[tier].items()
        for is_framed in (False, True)
    }


def mosaics_at(config: PretrainConfig, step: int) -> int:
    """Mosaics of a step with questions, at the high tier."""
    is_early = config.reading_progress(step) < _TILES_ARE_FOUND
    return config.early_mosaics if is_early else config.mosaics


def draw_question_types(
    config: PretrainConfig, step: int, count: int, rng: np.random.Generator, *, is_varied: bool = False
) -> np.ndarray:
    """Random question types by their share at this step: harder ones more often."""
    shares = _EARLY_TYPE_SHARES if config.reading_progress(step) < _TILES_ARE_FOUND else _LATER_TYPE_SHARES
    if config.phase(step) is Phase.CIPHER:
        shares = _CIPHER_TYPE_SHARES
    weights = np.array([0.0 if is_varied and name is QuestionType.CODE else shares[name] for name in QUESTION_TYPES])
    return rng.choice(len(QUESTION_TYPES), count, p=weights / weights.sum())
