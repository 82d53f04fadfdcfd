"""The training pass equals transformers' own, and a killed run ends with the weights of one that was not."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny.mosaic import answer_logits, configured, kept_blocks
from tools.mosaic.__main__ import main
from tools.mosaic.curriculum import PretrainConfig, draw_knobs, draw_question_types, frequent_names_at
from tools.mosaic.importance import answer_losses, features_of
from tools.mosaic.pretrain import build, pretrain
from transformers import LlavaForConditionalGeneration

from groupwise.workloads.controller.tasks.mosaic.model import MosaicSize
from groupwise.workloads.controller.tasks.mosaic.questions import (
    QUESTION_TYPES,
    QuestionType,
    draw_questions,
    make_question_set,
)
from groupwise.workloads.controller.tasks.mosaic.scene import HandwritingSplit, Tier, cut

TINY = PretrainConfig(
    size=MosaicSize(width=16, heads=2, expert_width=8, vision_width=16, vision_blocks=1, blocks=6),
    alignment_steps=3,
    alignment_mosaics=2,
    text_steps=5,
    text_horizon=8,
    cool_down_steps=2,
    recited_facts=3,
    early_text_mosaics=2,
    text_mosaics=2,
    questions_per_mosaic=3,
    varied_share=0.5,
    most_dropped_blocks=1,
)


def _quiet(_: str) -> None: ...


@pytest.mark.parametrize("killed_after", [2, 5])
def test_a_killed_run_goes_on_to_the_same_weights(tmp_path: Path, killed_after: int):
    whole = pretrain(TINY, tmp_path / "whole", print_line=_quiet, compiled=False)
    pretrain(TINY, tmp_path / "killed", print_line=_quiet, compiled=False, stop_after=killed_after, checkpoint_every=2)
    resumed = pretrain(TINY, tmp_path / "killed", print_line=_quiet, compiled=False, checkpoint_every=2)
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


@pytest.mark.parametrize("command", ["pretrain", "importance", "answer-table"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"python -m tools.mosaic {command}" in capsys.readouterr().out


def test_the_pretrain_command_writes_a_model_that_transformers_loads(tmp_path: Path):
    size = {"width": 16, "heads": 2, "expert-width": 8, "vision-width": 16, "vision-blocks": 1, "blocks": 6}
    steps = {"alignment-steps": 1, "alignment-mosaics": 1, "text-steps": 1, "early-text-mosaics": 1}
    values = {f"size.{name}": value for name, value in size.items()} | steps
    flags = [word for name, value in values.items() for word in (f"--config.{name}", str(value))]
    threads = str(torch.get_num_threads())
    main(["pretrain", "--folder", str(tmp_path), "--no-compiled", "--threads", threads, *flags])
    model = LlavaForConditionalGeneration.from_pretrained(tmp_path)
    assert len(model.model.language_model.layers) == 6


def test_training_changes_every_weight_in_use_but_the_routers(tmp_path: Path):
    start = build(TINY.size.config(), TINY.seed).state_dict()
    trained = pretrain(TINY, tmp_path, print_line=_quiet, compiled=False).model.state_dict()
    unmoved = {name for name, weight in trained.items() if torch.equal(weight, start[name])}
    # LLaVA takes the output of the tower's last block, before the tower's closing norm. Routing stays as it was drawn.
    idle = {f"model.vision_tower.post_layernorm.{part}" for part in ("weight", "bias")}
    assert unmoved == idle | {f"model.language_model.layers.{block}.mlp.gate.weight" for block in range(6)}


def test_a_checkpoint_of_another_plan_is_refused(tmp_path: Path):
    pretrain(TINY, tmp_path, print_line=_quiet, compiled=False, stop_after=2, checkpoint_every=2)
    with pytest.raises(ValueError, match="another plan"):
        pretrain(PretrainConfig(size=TINY.size, seed=1), tmp_path, print_line=_quiet, compiled=False)


def test_a_share_of_the_steps_is_varied_and_the_first_blocks_always_run():
    config = PretrainConfig(alignment_steps=0, text_horizon=4000, varied_share=0.3)
    knobs = [draw_knobs(config, step, config.random(step)) for step in range(1000, 2000)]
    varied = [k for k in knobs if len(k.blocks) < 16 or k.top_k < 8]
    assert 0.25 < len(varied) / len(knobs) < 0.32
    assert all(set(range(5)) <= set(k.blocks) for k in knobs)
    assert {len(k.blocks) for k in varied} == {12, 13, 14, 15, 16}
    assert {k.top_k for k in varied} == {4, 5, 6, 7, 8}


def test_the_first_text_steps_run_the_whole_model():
    config = PretrainConfig(alignment_steps=0, text_horizon=1000, varied_share=1.0)
    for step in range(0, 250, 10):
        knobs = draw_knobs(config, step, config.random(step))
        assert (knobs.blocks, knobs.top_k) == (tuple(range(16)), 8)


@pytest.mark.parametrize("step", [0, 400, 1000, 1900])
def test_steps_with_parts_left_out_have_no_memorized_questions(step: int):
    config = PretrainConfig(alignment_steps=0)
    drawn = draw_question_types(config, step, 2000, config.random(step), memorized=False)
    asked = {QUESTION_TYPES[number] for number in drawn}
    assert asked == set(QUESTION_TYPES) - {QuestionType.FACT, QuestionType.CODE, QuestionType.LORE}
    assert step == 0 or QuestionType.FACT in {
        QUESTION_TYPES[number] for number in draw_question_types(config, step, 2000, config.random(step))
    }


def test_pairs_are_of_fewer_names_later_and_keep_their_digits():
    config = PretrainConfig()
    assert (frequent_names_at(config, 1899), frequent_names_at(config, 1900)) == (30, 12)
    types, labels = np.full(5000, QUESTION_TYPES.index(QuestionType.LORE)), np.zeros((5000, 12), np.int64)
    early = draw_questions(labels, types, np.random.default_rng(0), frequent_names=30)
    late = draw_questions(labels, types, np.random.default_rng(1))
    said = [
        dict(zip(map(tuple, result.tokens.tolist()), result.answers.tolist(), strict=True)) for result in (early, late)
    ]
    assert {pair[2] for pair in said[1]} < {pair[2] for pair in said[0]}
    both = said[0].keys() & said[1].keys()
    assert len(both) > 500
    assert all(said[0][pair] == said[1][pair] for pair in both)


@pytest.mark.parametrize(("tier", "blocks", "top_k"), [(Tier.HIGH, 16, 8), (Tier.LOW, 12, 4), (Tier.MEDIUM, 14, 5)])
def test_packed_questions_are_answered_as_alone_by_transformers(tier: Tier, blocks: int, top_k: int):
    model = build(MosaicSize(width=32, expert_width=8, vision_width=16).config(), seed=3).eval()
    question_set = make_question_set(HandwritingSplit.VALIDATION, 2, per_type=1)
    kept = kept_blocks([9, 6, 12, 7], blocks)
    _, losses = answer_losses(model, question_set, features_of(model, question_set, tier), blocks=kept, top_k=top_k)
    with torch.no_grad(), configured(model, kept, top_k):
        for row, (tokens, length) in enumerate(
            zip(question_set.questions.tokens, question_set.questions.lengths, strict=True)
        ):
            mosaic = row // question_set.questions_per_mosaic
            crops = cut(question_set.mosaics.pixels[mosaic : mosaic + 1], tier)[0]
            logits = answer_logits(model, crops, tokens[:length].tolist(), tier)
            alone = -logits.log_softmax(0)[question_set.questions.answers[row]]
            torch.testing.assert_close(torch.tensor(losses[row]), alone, atol=1e-4, rtol=1e-4)
    assert len(model.model.language_model.layers) == 16
    assert {block.mlp.gate.top_k for block in model.model.language_model.layers} == {8}
