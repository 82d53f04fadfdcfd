"""The curriculum: what pretraining does at which step, as a pure function of the config and the step."""

import math
from dataclasses import dataclass, field

import numpy as np

from groupwise.workloads.controller.tasks.mosaic.model import FIRST_DROPPABLE_BLOCK, SMALLEST_TOP_K, MosaicSize
from groupwise.workloads.controller.tasks.mosaic.questions import (
    EARLY_FREQUENT_NAMES,
    FREQUENT_NAMES,
    QUESTION_TYPES,
    QuestionType,
)
from groupwise.workloads.controller.tasks.mosaic.scene import Tier

_EARLY_TYPE_SHARES = {
    QuestionType.EMPTY: 0.05,
    QuestionType.BLANKS: 0.07,
    QuestionType.DIGIT: 0.16,
    QuestionType.LARGEST: 0.12,
    QuestionType.COUNT: 0.15,
    QuestionType.TIMES: 0.1,
    QuestionType.SUM: 0.15,
    QuestionType.HOP: 0.2,
    QuestionType.FACT: 0.0,
    QuestionType.CODE: 0.0,
    QuestionType.LORE: 0.0,
}
_LATER_TYPE_SHARES = {
    QuestionType.EMPTY: 0.02,
    QuestionType.BLANKS: 0.04,
    QuestionType.DIGIT: 0.07,
    QuestionType.LARGEST: 0.1,
    QuestionType.COUNT: 0.18,
    QuestionType.TIMES: 0.13,
    QuestionType.SUM: 0.13,
    QuestionType.HOP: 0.13,
    QuestionType.FACT: 0.04,
    QuestionType.CODE: 0.12,
    QuestionType.LORE: 0.04,
}
_LAST_TYPE_SHARES = {
    QuestionType.EMPTY: 0.02,
    QuestionType.BLANKS: 0.04,
    QuestionType.DIGIT: 0.05,
    QuestionType.LARGEST: 0.09,
    QuestionType.COUNT: 0.22,
    QuestionType.TIMES: 0.09,
    QuestionType.SUM: 0.1,
    QuestionType.HOP: 0.08,
    QuestionType.FACT: 0.07,
    QuestionType.CODE: 0.17,
    QuestionType.LORE: 0.07,
}
_FINAL_TYPE_SHARES = {
    QuestionType.EMPTY: 0.02,
    QuestionType.BLANKS: 0.03,
    QuestionType.DIGIT: 0.03,
    QuestionType.LARGEST: 0.08,
    QuestionType.COUNT: 0.22,
    QuestionType.TIMES: 0.06,
    QuestionType.SUM: 0.07,
    QuestionType.HOP: 0.05,
    QuestionType.FACT: 0.13,
    QuestionType.CODE: 0.18,
    QuestionType.LORE: 0.13,
}
_MEMORIZED_TYPES = (QuestionType.FACT, QuestionType.CODE, QuestionType.LORE)
_TIERS = tuple(Tier)
_TIER_SHARES = (0.27, 0.28, 0.45)
_WARM_UP_STEPS = 40
# Fractions of the text phase's horizon. Finding a tile is learned by then: smaller batches, more hard questions, and
# the learning rate is held.
_TILES_ARE_FOUND = 0.2
# Blocks and experts are left out in some steps.
_KNOBS_VARY_FROM = 0.25
# All but counting is learned by then.
_COUNTING_FROM = 0.6
# Facts are trained without a mosaic, too.
_RECITED_FROM = 0.3
# They are of fewer names, and weigh more.
_FEWER_NAMES_FROM = 11 / 15
_RECITE_WEIGHT_EARLY, _RECITE_WEIGHT_LATE = 0.5, 1.5
# More memorized facts after a mosaic, and more counting.
_FINAL_FROM = 14 / 15


@dataclass(frozen=True)
class PretrainConfig:
    """Everything a pretraining run depends on."""

    size: MosaicSize = field(default_factory=MosaicSize)
    seed: int = 0
    alignment_steps: int = 800
    alignment_mosaics: int = 48
    alignment_learning_rate: float = 2e-3
    text_steps: int = 2000
    text_horizon: int = 1500
    """The stages of the text phase are fractions of this many steps; `text_steps` may end sooner or later."""
    cool_down_steps: int = 550
    """The last text steps, in which the learning rate falls linearly."""
    early_text_mosaics: int = 16
    text_mosaics: int = 10
    text_learning_rate: float = 2e-3
    vision_share: float = 0.2
    questions_per_mosaic: int = 24
    recited_facts: int = 320
    """Questions of types `fact` and `lore` without a mosaic, added to each later step: memorizing takes repetition."""
    varied_share: float = 0.3
    """Fraction of the later steps that run with fewer blocks or a smaller top-k. They have no memorized questions:
    reading tiles shall survive these knobs, memorized facts shall not."""
    most_dropped_blocks: int = 4

    @property
    def steps(self) -> int:
        """Alignment steps of the vision tower, then text steps of the whole model."""
        return self.alignment_steps + self.text_steps

    def random(self, step: int) -> np.random.Generator:
        """The random numbers of this step, independent of all other steps."""
        return np.random.default_rng([self.seed, step])

    def learning_rate(self, step: int) -> float:
        """A ramp and a cosine for the vision tower; then a ramp, a hold and a cool-down."""
        aligning = step < self.alignment_steps
        peak = self.alignment_learning_rate if aligning else self.text_learning_rate
        done = step if aligning else step - self.alignment_steps
        length = self.alignment_steps if aligning else self.text_horizon
        fallen = done if aligning else min(done, round(_TILES_ARE_FOUND * self.text_horizon))
        ramp = min(1.0, (done + 1) / _WARM_UP_STEPS)
        left = 1.0 if aligning else min(1.0, (self.text_steps - done) / self.cool_down_steps)
        return peak * ramp * left * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * fallen / length)))

    def vision_learning_rate(self, step: int) -> float:
        """The rate of vision tower and projector: smaller in the text phase."""
        return self.learning_rate(step) * (1.0 if step < self.alignment_steps else self.vision_share)

    def text_progress(self, step: int) -> float:
        """Progress of the text phase: 0 at its start, 1 at its horizon."""
        return (step - self.alignment_steps) / self.text_horizon


@dataclass(frozen=True)
class StepKnobs:
    """The configuration one training step runs with."""

    tier: Tier
    blocks: tuple[int, ...]
    top_k: int
    insertion_position: int = 1


def draw_knobs(config: PretrainConfig, step: int, rng: np.random.Generator) -> StepKnobs:
    """A random tier, and in some steps random blocks to leave out and a random top-k."""
    tier = _TIERS[rng.choice(len(_TIERS), p=_TIER_SHARES)]
    everything = range(config.size.blocks)
    is_varied = rng.random() < config.varied_share
    if not (is_varied and config.text_progress(step) >= _KNOBS_VARY_FROM):
        return StepKnobs(tier=tier, blocks=tuple(everything), top_k=config.size.top_k)
    droppable = np.arange(FIRST_DROPPABLE_BLOCK, config.size.blocks)
    dropped = set(rng.permutation(droppable)[: rng.integers(0, config.most_dropped_blocks + 1)].tolist())
    top_k = int(rng.integers(SMALLEST_TOP_K, config.size.top_k + 1))
    return StepKnobs(
        tier=tier,
        blocks=tuple(block for block in everything if block not in dropped),
        top_k=top_k,
        insertion_position=int(rng.integers(1, FIRST_DROPPABLE_BLOCK + 1)),
    )


def recited_at(config: PretrainConfig, step: int) -> int:
    """Facts without a mosaic in a text step."""
    return config.recited_facts if config.text_progress(step) >= _RECITED_FROM else 0


def frequent_names_at(config: PretrainConfig, step: int) -> int:
    """How many names the others are paired with."""
    return FREQUENT_NAMES if config.text_progress(step) >= _FEWER_NAMES_FROM else EARLY_FREQUENT_NAMES


def recite_weight(config: PretrainConfig, step: int) -> float:
    """Loss weight of the facts without a mosaic."""
    return _RECITE_WEIGHT_LATE if config.text_progress(step) >= _FEWER_NAMES_FROM else _RECITE_WEIGHT_EARLY


def mosaics_at(config: PretrainConfig, step: int) -> int:
    """Mosaics of a text step at the high tier."""
    return config.early_text_mosaics if config.text_progress(step) < _TILES_ARE_FOUND else config.text_mosaics


def draw_question_types(
    config: PretrainConfig, step: int, count: int, rng: np.random.Generator, *, memorized: bool = True
) -> np.ndarray:
    """Random question types by their share at this step: harder ones more often."""
    progress = config.text_progress(step)
    stages = (
        (_TILES_ARE_FOUND, _EARLY_TYPE_SHARES),
        (_COUNTING_FROM, _LATER_TYPE_SHARES),
        (_FINAL_FROM, _LAST_TYPE_SHARES),
        (math.inf, _FINAL_TYPE_SHARES),
    )
    shares = next(shares for end, shares in stages if progress < end)
    weights = np.array([shares[name] if memorized or name not in _MEMORIZED_TYPES else 0.0 for name in QUESTION_TYPES])
    return rng.choice(len(QUESTION_TYPES), count, p=weights / weights.sum())
