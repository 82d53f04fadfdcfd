"""The shipped table of answers: it is this model's, it covers the recipe, and the model still says what it says."""

import random

import numpy as np
import pytest
from tools.mosaic.answer_table import answer_every_configuration

from groupwise.recipes import load_recipe
from groupwise.workloads.controller.model.adapters import LlavaAdapter
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor
from groupwise.workloads.controller.tasks.mosaic.answer_table import TABLE, load_answer_table, save_remembered
from groupwise.workloads.controller.tasks.mosaic.model import ASSET, load_mosaic, mosaic_options
from groupwise.workloads.controller.tasks.mosaic.task import Part, mosaic_questions

OPTIONS = mosaic_options()
EVERY = list(OPTIONS.configurations())


@pytest.fixture(scope="module")
def executor():
    return Executor(LlavaAdapter(load_mosaic()), OPTIONS)


@pytest.fixture(scope="module")
def table():
    found = load_answer_table(OPTIONS)
    assert found is not None, "asset/answers.npz is of another model: run scripts/remember_mosaic.py"
    return found


def test_every_question_of_the_recipe_is_in_it_and_it_is_small(table):
    config = load_recipe("controller").workload
    wanted = {Part.TRAIN: config.mosaics, Part.CHOOSE: config.choose_mosaics, Part.TEST: config.test_mosaics}
    for part, mosaics in wanted.items():
        assert {question.sample.name for question in mosaic_questions(part, mosaics)} <= table.rows.keys()
    assert (ASSET / TABLE).stat().st_size < 2e6


def test_the_model_still_says_what_is_remembered(executor, table):
    chance = random.Random(11)
    asked = [question for part in Part for question in chance.sample(mosaic_questions(part, 12), 8)]
    requests = [AnswerRequest(question.sample, chance.choice(EVERY)) for question in asked]
    answers, _ = executor.answer(requests)
    for request, answer in zip(requests, answers, strict=True):
        assert table.get(request.sample.name, request.knobs) == answer.tokens
        assert table.get_all(request.sample.name)[EVERY.index(request.knobs)] == answer.tokens


def test_a_table_of_another_model_is_passed_over(tmp_path):
    for name in ("model.safetensors", "importance.json"):
        (tmp_path / name).write_text("one model")
    names, tokens = ["00" * 16, "0f" * 16], np.arange(2 * len(EVERY), dtype=np.int64).reshape(2, -1) % 200
    save_remembered(names, tokens.astype(np.uint8), tmp_path)
    found = load_answer_table(OPTIONS, tmp_path)
    assert found.get("0f" * 16, EVERY[3]) == (int(tokens[1, 3]),)
    assert found.get("11" * 16, EVERY[3]) is found.get_all("11" * 16) is None
    (tmp_path / "model.safetensors").write_text("the next model")
    assert load_answer_table(OPTIONS, tmp_path) is None


def test_all_at_once_is_one_by_one(executor):
    """Two mosaics under a few of the paths, among them dropped blocks and a late insertion position."""
    questions = mosaic_questions(Part.CHOOSE, 2, seed=5)
    few = type(OPTIONS)(
        crops_by_tier={"low": OPTIONS.crops_by_tier["low"]},
        total_blocks=OPTIONS.total_blocks,
        full_top_k=OPTIONS.full_top_k,
        drop_order=OPTIONS.drop_order,
        insertion_positions=(1, 5),
        max_dropped_blocks=1,
        smallest_top_k=OPTIONS.full_top_k - 1,
    )
    found = answer_every_configuration(executor.adapter.model, few, questions)
    requests = [AnswerRequest(question.sample, knobs) for question in questions for knobs in few.configurations()]
    answers, _ = Executor(executor.adapter, few).answer(requests)
    assert found.flatten().tolist() == [answer.tokens[0] for answer in answers]
