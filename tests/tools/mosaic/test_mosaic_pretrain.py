"""The training pass equals transformers' own, and a killed run ends with the weights of one that was not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny.mosaic import answer_logits, configured, kept_blocks
from tools.mosaic.__main__ import main
from tools.mosaic.curriculum import PretrainConfig, StepKnobs, draw_knobs, draw_question_types, family_shares
from tools.mosaic.importance import answer_losses, features_of
from tools.mosaic.pretrain import build, pretrain
from transformers import LlavaForConditionalGeneration

from groupwise.workloads.controller.tasks.mosaic.model import MosaicSize
from groupwise.workloads.controller.tasks.mosaic.questions import (
    QUESTION_TYPES,
    QuestionType,
    make_question_set,
)
from groupwise.workloads.controller.tasks.mosaic.scene import FamilyShares, HandwritingSplit, Tier, cut

TINY = PretrainConfig(
    size=MosaicSize(width=16, heads=2, expert_width=8, vision_width=16, vision_blocks=1, blocks=6),
    alignment_steps=3,
    naming_steps=2,
    alignment_mosaics=2,
    reading_steps=3,
    cipher_steps=3,
    cipher_blocks=4,
    early_mosaics=2,
    mosaics=2,
    questions_per_mosaic=3,
    cipher_questions_per_mosaic=3,
    varied_share=0.5,
)


def _quiet(_: str) -> None: ...


@pytest.mark.parametrize("killed_after", [2, 4, 7, 10])
def test_a_killed_run_goes_on_to_the_same_weights(tmp_path: Path, killed_after: int):
    whole = pretrain(TINY, tmp_path / "whole", print_line=_quiet, compiled=False)
    pretrain(TINY, tmp_path / "killed", print_line=_quiet, compiled=False, stop_after=killed_after, checkpoint_every=2)
    resumed = pretrain(TINY, tmp_path / "killed", print_line=_quiet, compiled=False, checkpoint_every=2)
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


@pytest.mark.parametrize("command", ["pretrain", "importance", "answer-table", "contact-sheet"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"python -m tools.mosaic {command}" in capsys.readouterr().out


def test_the_pretrain_command_writes_a_model_that_transformers_loads(tmp_path: Path):
    size = {"width": 16, "heads": 2, "expert-width": 8, "vision-width": 16, "vision-blocks": 1, "blocks": 6}
    steps = {
        "alignment-steps": 1,
        "naming-steps": 1,
        "alignment-mosaics": 1,
        "reading-steps": 1,
        "cipher-steps": 1,
        "early-mosaics": 1,
    }
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


def test_the_cipher_is_learned_by_the_last_blocks_alone(tmp_path: Path):
    cipher = replace(TINY, cipher_steps=6)
    read = pretrain(cipher, tmp_path, print_line=_quiet, compiled=False, stop_after=8, checkpoint_every=8).state_dict()
    trained = pretrain(cipher, tmp_path, print_line=_quiet, compiled=False).state_dict()
    changed = {name for name, weight in trained.items() if not torch.equal(weight, read[name])}
    last = tuple(f"model.model.language_model.layers.{block}." for block in (2, 3, 4, 5))
    head = {"model.model.language_model.norm.weight", "model.lm_head.weight"}
    assert {name for name in changed if not name.startswith(last)} == head
    assert {name[: len(last[0])] for name in changed if name.startswith(last)} == set(last)


def knobs_and_families(config: PretrainConfig, steps: range) -> list[tuple[StepKnobs, FamilyShares]]:
    knobs = [draw_knobs(config, step, config.random(step)) for step in steps]
    return [
        (drawn, family_shares(config, step, drawn.tier, is_varied=drawn.is_varied))
        for step, drawn in zip(steps, knobs, strict=True)
    ]


def test_reading_runs_the_first_eight_blocks_and_later_with_fewer_experts():
    config = PretrainConfig(alignment_steps=0, naming_steps=0, reading_steps=1000, reading_horizon=1000)
    early, late = (knobs_and_families(config, steps) for steps in (range(350), range(350, 1000)))
    assert {knobs.blocks for knobs, _ in early + late} == {8}
    assert {knobs.top_k for knobs, _ in early} == {8}
    assert {knobs.top_k for knobs, _ in late} == {4, 5, 6, 7, 8}


def test_fewer_blocks_never_meet_a_frame_or_a_code():
    config = PretrainConfig(alignment_steps=0, naming_steps=0, reading_steps=0, cipher_steps=1000)
    drawn = knobs_and_families(config, range(1000))
    varied = [(knobs, shares) for knobs, shares in drawn if knobs.is_varied]
    assert 0.25 < len(varied) / len(drawn) < 0.35
    assert {knobs.blocks for knobs, _ in varied} == {8, 9, 10, 11, 12}
    assert {(knobs.blocks, knobs.top_k) for knobs, _ in drawn if not knobs.is_varied} == {(12, 8)}
    for _, shares in varied:
        assert not any(share for (_, framed), share in shares.items() if framed)
    asked = {QUESTION_TYPES[index] for index in draw_question_types(config, 5, 999, config.random(5), is_varied=True)}
    assert asked == set(QUESTION_TYPES) - {QuestionType.CODE}


def test_learning_rates_by_hand():
    config = PretrainConfig(alignment_steps=100, naming_steps=0, reading_steps=100, cipher_steps=100, cool_down=0.4)
    assert config.learning_rate_at(0) == pytest.approx(2e-3 / 40)
    assert config.learning_rate_at(50) == pytest.approx(2e-3 * 0.515)  # half of the cosine
    assert config.learning_rate_at(150) == pytest.approx(2e-3)
    assert config.learning_rate_at(180) == pytest.approx(2e-3 * 0.5)  # 20 of 40 steps are left
    assert config.learning_rate_at(200) == pytest.approx(2e-3 / 40)
    assert config.vision_learning_rate_at(150) == pytest.approx(4e-4)


@pytest.mark.parametrize(("tier", "blocks", "top_k"), [(Tier.HIGH, 12, 8), (Tier.LOW, 8, 4), (Tier.MEDIUM, 10, 5)])
def test_packed_questions_are_answered_as_alone_by_transformers(tier: Tier, blocks: int, top_k: int):
    model = build(MosaicSize(width=32, expert_width=8, vision_width=16).config(), seed=3).eval()
    question_set = make_question_set(HandwritingSplit.VALIDATION, 2, per_type=1)
    kept = kept_blocks([9, 6, 11, 7], blocks)
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
    assert len(model.model.language_model.layers) == 12
    assert {block.mlp.gate.top_k for block in model.model.language_model.layers} == {8}
