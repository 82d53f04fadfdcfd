"""What pretraining does at which step: a pure function of the plan and the step."""

import math
from dataclasses import dataclass, field

import numpy as np

from groupwise.workloads.controller.tasks.mosaic.model import FIRST_DROPPABLE_BLOCK, SMALLEST_TOP_K, MosaicSize
from groupwise.workloads.controller.tasks.mosaic.questions import FAMOUS_NAMES, KINDS, ONCE_FAMOUS_NAMES, Kind
from groupwise.workloads.controller.tasks.mosaic.scene import Tier

_EARLY_KIND_SHARES = {
    Kind.EMPTY: 0.05,
    Kind.BLANKS: 0.07,
    Kind.DIGIT: 0.16,
    Kind.LARGEST: 0.12,
    Kind.COUNT: 0.15,
    Kind.TIMES: 0.1,
    Kind.SUM: 0.15,
    Kind.HOP: 0.2,
    Kind.FACT: 0.0,
    Kind.CODE: 0.0,
    Kind.LORE: 0.0,
}
_LATER_KIND_SHARES = {
    Kind.EMPTY: 0.02,
    Kind.BLANKS: 0.04,
    Kind.DIGIT: 0.07,
    Kind.LARGEST: 0.1,
    Kind.COUNT: 0.18,
    Kind.TIMES: 0.13,
    Kind.SUM: 0.13,
    Kind.HOP: 0.13,
    Kind.FACT: 0.04,
    Kind.CODE: 0.12,
    Kind.LORE: 0.04,
}
_LAST_KIND_SHARES = {
    Kind.EMPTY: 0.02,
    Kind.BLANKS: 0.04,
    Kind.DIGIT: 0.05,
    Kind.LARGEST: 0.09,
    Kind.COUNT: 0.22,
    Kind.TIMES: 0.09,
    Kind.SUM: 0.1,
    Kind.HOP: 0.08,
    Kind.FACT: 0.07,
    Kind.CODE: 0.17,
    Kind.LORE: 0.07,
}
_FINAL_KIND_SHARES = {
    Kind.EMPTY: 0.02,
    Kind.BLANKS: 0.03,
    Kind.DIGIT: 0.03,
    Kind.LARGEST: 0.08,
    Kind.COUNT: 0.22,
    Kind.TIMES: 0.06,
    Kind.SUM: 0.07,
    Kind.HOP: 0.05,
    Kind.FACT: 0.13,
    Kind.CODE: 0.18,
    Kind.LORE: 0.13,
}
_KNOWN_BY_HEART = (Kind.FACT, Kind.CODE, Kind.LORE)
_TIERS = tuple(Tier)
_TIER_SHARES = (0.27, 0.28, 0.45)
_WARM_UP_STEPS = 40
# Shares of the text phase's horizon: from here on batches are smaller, hard questions more frequent and the learning
# rate is held (finding a tile is learned by then); and from here on blocks and experts are left out in some steps.
_TILES_ARE_FOUND = 0.2
_KNOBS_VARY_FROM = 0.25
# By then all but counting is learned.
_COUNTING_FROM = 0.6
# From here on facts are recited.
_RECITED_FROM = 0.3
# From here on they are of fewer names, and weigh more.
_BY_HEART_FROM = 11 / 15
_RECITE_WEIGHT_EARLY, _RECITE_WEIGHT_LATE = 0.5, 1.5
# From here on what was learned by heart is asked for after a mosaic, and counting is brushed up.
_FINAL_FROM = 14 / 15


@dataclass(frozen=True)
class PretrainConfig:
    """All that a pretraining run depends on."""

    size: MosaicSize = field(default_factory=MosaicSize)
    seed: int = 0
    alignment_steps: int = 800
    alignment_mosaics: int = 48
    alignment_learning_rate: float = 2e-3
    text_steps: int = 2000
    text_horizon: int = 1500
    """The stages of the text phase are shares of this many steps; `text_steps` may end sooner or later."""
    cool_down_steps: int = 550
    """The last of them, in which the rate falls in a straight line."""
    early_text_mosaics: int = 16
    text_mosaics: int = 10
    text_learning_rate: float = 2e-3
    vision_share: float = 0.2
    questions_per_mosaic: int = 24
    recited_facts: int = 320
    """Questions of kinds `fact` and `lore` in each later step besides, without a mosaic: what is learned by heart needs
    repeating, and is best learned where nothing distracts."""
    varied_share: float = 0.3
    """Share of the steps, once tiles are found, that run with fewer blocks or a smaller top-k. They ask for nothing
    that is known by heart: seeing is to bear them, remembering is not."""
    most_dropped_blocks: int = 4

    @property
    def steps(self) -> int:
        """All steps: the vision tower's, then the whole model's."""
        return self.alignment_steps + self.text_steps

    def random(self, step: int) -> np.random.Generator:
        """Return the numbers of this step: they depend on nothing that ran before."""
        return np.random.default_rng([self.seed, step])

    def learning_rate(self, step: int) -> float:
        """Return a ramp and a cosine for the vision tower; then a ramp, a hold and a cool-down."""
        aligning = step < self.alignment_steps
        peak = self.alignment_learning_rate if aligning else self.text_learning_rate
        done = step if aligning else step - self.alignment_steps
        length = self.alignment_steps if aligning else self.text_horizon
        fallen = done if aligning else min(done, round(_TILES_ARE_FOUND * self.text_horizon))
        ramp = min(1.0, (done + 1) / _WARM_UP_STEPS)
        left = 1.0 if aligning else min(1.0, (self.text_steps - done) / self.cool_down_steps)
        return peak * ramp * left * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * fallen / length)))

    def vision_learning_rate(self, step: int) -> float:
        """Return the rate for vision tower and projector: small once the text model learns too."""
        return self.learning_rate(step) * (1.0 if step < self.alignment_steps else self.vision_share)

    def text_progress(self, step: int) -> float:
        """Return how far the second phase is: 0 at its start, 1 at its horizon."""
        return (step - self.alignment_steps) / self.text_horizon


@dataclass(frozen=True)
class StepKnobs:
    """The configuration one training step runs with."""

    tier: Tier
    blocks: tuple[int, ...]
    top_k: int
    insertion_position: int = 1


def draw_knobs(plan: PretrainConfig, step: int, rng: np.random.Generator) -> StepKnobs:
    """Draw a tier, and in a share of the steps which blocks to leave out and a top-k."""
    tier = _TIERS[rng.choice(len(_TIERS), p=_TIER_SHARES)]
    everything = range(plan.size.blocks)
    is_varied = rng.random() < plan.varied_share
    if not (is_varied and plan.text_progress(step) >= _KNOBS_VARY_FROM):
        return StepKnobs(tier=tier, blocks=tuple(everything), top_k=plan.size.top_k)
    droppable = np.arange(FIRST_DROPPABLE_BLOCK, plan.size.blocks)
    dropped = set(rng.permutation(droppable)[: rng.integers(0, plan.most_dropped_blocks + 1)].tolist())
    top_k = int(rng.integers(SMALLEST_TOP_K, plan.size.top_k + 1))
    return StepKnobs(
        tier=tier,
        blocks=tuple(block for block in everything if block not in dropped),
        top_k=top_k,
        insertion_position=int(rng.integers(1, FIRST_DROPPABLE_BLOCK + 1)),
    )


def recited_at(plan: PretrainConfig, step: int) -> int:
    """Return how many facts a text step recites."""
    return plan.recited_facts if plan.text_progress(step) >= _RECITED_FROM else 0


def famous_names_at(plan: PretrainConfig, step: int) -> int:
    """Return with how many names the others are paired."""
    return FAMOUS_NAMES if plan.text_progress(step) >= _BY_HEART_FROM else ONCE_FAMOUS_NAMES


def recite_weight(plan: PretrainConfig, step: int) -> float:
    """Return the weight of what is recited."""
    return _RECITE_WEIGHT_LATE if plan.text_progress(step) >= _BY_HEART_FROM else _RECITE_WEIGHT_EARLY


def mosaics_at(plan: PretrainConfig, step: int) -> int:
    """Return how many mosaics a text step takes at the high tier."""
    return plan.early_text_mosaics if plan.text_progress(step) < _TILES_ARE_FOUND else plan.text_mosaics


def draw_kinds(
    plan: PretrainConfig, step: int, count: int, rng: np.random.Generator, *, by_heart: bool = True
) -> np.ndarray:
    """Draw kinds of questions by their share in training: harder ones more often."""
    progress = plan.text_progress(step)
    stages = (
        (_TILES_ARE_FOUND, _EARLY_KIND_SHARES),
        (_COUNTING_FROM, _LATER_KIND_SHARES),
        (_FINAL_FROM, _LAST_KIND_SHARES),
        (math.inf, _FINAL_KIND_SHARES),
    )
    shares = next(shares for end, shares in stages if progress < end)
    wanted = np.array([shares[kind] if by_heart or kind not in _KNOWN_BY_HEART else 0.0 for kind in KINDS])
    return rng.choice(len(KINDS), count, p=wanted / wanted.sum())
