"""The model card, written from measurements."""

from collections.abc import Sequence

from transformers import LlavaForConditionalGeneration

from groupwise.workloads.controller.mosaic.crops import CROPS, TOKENS_PER_CROP, Tier
from groupwise.workloads.controller.mosaic.pretrain.plan import Plan
from groupwise.workloads.controller.mosaic.score.knobs import CHEAPEST, FULL, SINGLE_KNOBS
from groupwise.workloads.controller.mosaic.score.tables import (
    Measured,
    choice_gains,
    choice_table,
    grid_table,
    kind_table,
    knob_table,
)

_HISTORY = """\
The shipped weights are those of one run of this plan. It was stopped twice, after 1,000 and 1,900 steps, and taken up
again, which changes no bit; its three parts took 68 minutes on one thread beside a busy core. From start to end on the
two threads that are the default, the plan took 40 minutes (weights of other rounding, not these)."""
_CARD = """# mosaic

A multimodal mixture of experts small enough to ship with the package, for work on the controller: {parameters:.2f} M
parameters, a `LlavaForConditionalGeneration` of a SigLIP vision tower ({vision_blocks} blocks of width {vision_width})
and an OLMoE text model ({blocks} blocks of width {width}, top-{top_k} of {experts} experts of width {expert_width},
routing weights not renormalised).

It is shown a mosaic of 3 x 4 handwritten digits (some tiles empty) and answers one question with one token. The mosaic
is seen as an overview and {crops} crops (tiers low, medium, high), {tokens} tokens each; a crop has three planes:
brightness, and the place of each pixel across and down the mosaic. Kinds of questions: `empty b3`, `blanks row2` (how
many empty tiles), `digit b3`, `largest row2`, `count 7`, `times a1 b3` (the product's last digit), `sum a1 b3`,
`hop b3` (the digit of that tile is the number of the tile to read, in reading order from 0), `fact n7 n3` and
`lore n7 n3` (two digits of a pair of names, known by heart) and `code n7 b3` (what the digit of the tile is in the code
of a name, known by heart too).

## How it was made

`python scripts/pretrain_mosaic.py --folder FOLDER --threads 1` with its default plan, in float32 on the CPU; stored in
bfloat16. In {alignment_steps:,} steps the vision tower and the projector learn to say, in the text model's word
vectors, what each image token shows; in {text_steps:,} steps the whole model learns questions, {questions} per mosaic
under a block mask. Once tiles are found, {varied:.0%} of the steps run with up to four blocks left out (never one of
the first five) and a smaller top-k; they ask for nothing that is known by heart. All others recite {recited} facts and
lore besides, without a mosaic, at first with more names than are asked for later. So what the model sees bears the
knobs better than what it remembers. Routing stays as it was drawn: learned, it puts the useful experts first, and a
smaller top-k hardly shows.

{history}

The handwriting is scikit-learn's `load_digits` (1,797 images of 8 x 8 pixels): 1,250 images for training, 247 for
validation, 300 for test.

## What it scores

`python scripts/score_mosaic.py card`, on {test_questions:,} questions of test handwriting, all kinds equally frequent
(the answers are in `answers.npz`, made by `scripts/remember_mosaic.py`). Blocks are dropped in the order {order},
measured on validation mosaics (`importance.json`). A smaller top-k holds from the second block on. Times are lower
quartiles of single questions from crops to answer on one thread of a shared machine: compare them with each other only.
`scores.json` has all 75 settings.

Each knob alone, answered by the executor:

{knobs}

The same with transformers' own forward pass:

{knobs_transformers}

By kind of question:

{kinds}

{grids}

The best setting for each kind of question against the best single setting, at budgets between cheapest and full (chosen
on validation, scored on test, times of the executor):

{choice}

## Limits

It knows this task and nothing else: no free text, no other images. {limits}
"""


def model_card(
    model: LlavaForConditionalGeneration,
    measured: Measured,
    drop_order: Sequence[int],
    plan: Plan,
    *,
    test_questions: int,
) -> str:
    """Return the card's text."""
    text, vision = model.config.text_config, model.config.vision_config
    return _CARD.format(
        parameters=sum(weight.numel() for weight in model.parameters()) / 1e6,
        vision_blocks=vision.num_hidden_layers,
        vision_width=vision.hidden_size,
        blocks=text.num_hidden_layers,
        width=text.hidden_size,
        top_k=text.num_experts_per_tok,
        experts=text.num_experts,
        expert_width=text.intermediate_size,
        crops=", ".join(str(CROPS[tier]) for tier in Tier),
        tokens=TOKENS_PER_CROP,
        questions=plan.questions_per_mosaic,
        alignment_steps=plan.alignment_steps,
        text_steps=plan.text_steps,
        recited=plan.recited_facts,
        varied=plan.varied_share,
        history=_HISTORY,
        test_questions=test_questions,
        order=", ".join(map(str, drop_order)),
        knobs=knob_table(measured, "executor"),
        knobs_transformers=knob_table(measured, "transformers"),
        kinds=kind_table(measured.test),
        grids="\n\n".join(grid_table(measured.test, tier) for tier in reversed(Tier)),
        choice=choice_table(measured, "executor"),
        limits=_limits(measured),
    )


def _limits(measured: Measured) -> str:
    """Say which of the aims of the embedded model these measurements miss."""
    right = {setting: float(shares.mean()) for setting, shares in measured.test.items()}
    ms = measured.ms["executor"]
    missed = []
    if right[FULL] < 0.88:
        missed.append(f"the full setting is right in {right[FULL]:.1%}, not 88 %")
    if right[FULL] - right[CHEAPEST] < 0.15 or ms[CHEAPEST] > 0.6 * ms[FULL]:
        missed.append("the cheapest setting is not 15 points lower at 60 % of the time")
    for knob, setting in SINGLE_KNOBS.items():
        points, saved = 100 * (right[FULL] - right[setting]), 1 - ms[setting] / ms[FULL]
        if points < 2 or saved < 0.08:
            missed.append(f"the {knob} knob alone costs {points:.1f} points, not 2, and saves {saved:.0%} of the time")
    best_gain = max(gain.points for gain in choice_gains(measured, "executor"))
    if best_gain < 3:
        missed.append(
            f"choosing by kind gains at most {best_gain:.1f} points, not 3, and nothing at the larger budgets"
        )
    return f"Aims missed: {'; '.join(missed)}." if missed else "All aims of its design are met in the tables above."
