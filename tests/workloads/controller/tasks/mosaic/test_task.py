"""The controller's task on the embedded model: whose handwriting it is, what is asked, and that the recipe runs."""

import subprocess
import sys
from dataclasses import replace
from itertools import combinations

import pytest
from processes import ENVIRONMENT

import groupwise as gw
from groupwise.recipes import load_recipe
from groupwise.workloads.controller.latency.estimates import ProportionalEstimator
from groupwise.workloads.controller.model.adapters import LlavaAdapter
from groupwise.workloads.controller.model.executor import Executor, PrefixItem
from groupwise.workloads.controller.task import Split
from groupwise.workloads.controller.tasks.mosaic.config import MosaicConfig
from groupwise.workloads.controller.tasks.mosaic.model import load_mosaic, mosaic_options
from groupwise.workloads.controller.tasks.mosaic.questions import QUESTION_TYPES, encode
from groupwise.workloads.controller.tasks.mosaic.scene import HandwritingSplit, load_handwriting
from groupwise.workloads.controller.tasks.mosaic.task import handwriting_of, mosaic_questions
from groupwise.workloads.controller.tasks.vqa.config import VqaConfig


def test_no_two_splits_and_not_the_pretraining_share_an_image():
    images = {split: set(handwriting_of(split).source_rows.tolist()) for split in Split}
    images["pretraining"] = set(load_handwriting(HandwritingSplit.TRAIN).source_rows.tolist())
    for one, other in combinations(images, 2):
        assert not images[one] & images[other]
    for split in (Split.TRAIN, Split.SELECT):
        assert set(handwriting_of(split).labels.tolist()) == set(range(10))


def test_questions_are_drawn_once_and_for_all_with_every_type_about_every_mosaic():
    questions, again = (mosaic_questions(Split.TRAIN, 3) for _ in range(2))
    assert [each.sample.name for each in questions] == [each.sample.name for each in again]
    assert [each.text.split()[0] for each in questions] == [str(name) for name in QUESTION_TYPES] * 3
    other = mosaic_questions(Split.TRAIN, 3, seed=1)
    assert not {each.sample.name for each in questions} & {each.sample.name for each in other}


def test_prompt_lengths_are_what_the_model_gets():
    (question, *_) = mosaic_questions(Split.SELECT, 1)
    executor = Executor(LlavaAdapter(load_mosaic()), mosaic_options())
    computed = executor.run_prefix([PrefixItem([question.sample], tier) for tier in question.prompt_tokens]).computed
    lengths = [len(computed.states[(question.sample.name, tier), ()]) for tier in question.prompt_tokens]
    assert lengths == list(question.prompt_tokens.values())
    assert question.sample.question_ids == tuple(encode(question.text))


def test_counted_work_by_hand():
    options, question = mosaic_options(), mosaic_questions(Split.SELECT, 1)[0]
    price = ProportionalEstimator(options, crop_ms=2, block_ms=3, pair_ms=0.01, spread=0.5)
    (full,) = price.estimate(question.prompt_tokens, [options.full])
    tokens, blocks = question.prompt_tokens[options.full.tier], options.total_blocks
    pairs = options.full_top_k * (tokens * (blocks - 1) + 1)  # in the last block only the last token's
    expected = 2 * (1 + options.crops_by_tier[options.full.tier]) + 3 * blocks + 0.01 * pairs
    assert full.total_ms == pytest.approx(expected)
    assert full.upper_ms == pytest.approx(1.5 * expected)


def test_the_recipe_runs(tmp_path):
    config = load_recipe("controller")
    few = replace(
        config.workload, mosaics=3, held_out_mosaics=1, answers=tmp_path / "answers.db", estimator="proportional"
    )
    small = replace(config, workload=few, steps=1, conditions_per_step=4, group_size=4, rows_per_pass=16)
    summary = gw.train(replace(small, run=gw.RunConfig(run_dir=tmp_path / "run")))
    assert summary.eval_after["accuracy_greedy"] > 0.3
    assert summary.eval_after["estimated_over_budget_fraction"] == 0


def test_settings_are_read_without_torch():
    program = "import sys, groupwise.recipes.controller as made; made.recipe(); assert 'torch' not in sys.modules"
    ended = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_a_run_goes_on_with_the_estimator_it_was_trained_with(tmp_path):
    """Also where this machine's own has been deleted since."""
    own, named = MosaicConfig(), MosaicConfig(estimator="proportional")
    assert own.for_resume(tmp_path) == own
    (tmp_path / "estimator.json").write_text("{}")
    assert own.for_resume(tmp_path).estimator == str(tmp_path / "estimator.json")
    assert named.for_resume(tmp_path) == named
    assert VqaConfig(estimator="auto").for_resume(tmp_path).estimator == str(tmp_path / "estimator.json")
