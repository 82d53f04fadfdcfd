"""The precomputed answers: they are this model's, they cover the recipe, and the model still gives them."""

import random

import numpy as np
import pytest
from tools.mosaic.answer_table import answer_every_configuration

from groupwise.recipes import load_recipe
from groupwise.workloads.controller.model.adapters import LlavaAdapter
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor
from groupwise.workloads.controller.task import Split
from groupwise.workloads.controller.tasks.mosaic.answer_table import TABLE, load_answer_table, save_answer_table
from groupwise.workloads.controller.tasks.mosaic.model import ASSET, load_mosaic, mosaic_options
from groupwise.workloads.controller.tasks.mosaic.task import mosaic_questions

OPTIONS = mosaic_options()
EVERY = list(OPTIONS.configurations())


@pytest.fixture(scope="module")
def executor():
    return Executor(LlavaAdapter(load_mosaic()), OPTIONS)


@pytest.fixture(scope="module")
def table():
    result = load_answer_table(OPTIONS)
    assert result is not None, "asset/answers.npz is of another model: run `python -m tools.mosaic answer-table`"
    return result


def test_every_question_of_the_recipe_is_in_it_and_it_is_small(table):
    config = load_recipe("controller").workload
    wanted = {Split.TRAIN: config.mosaics, Split.SELECT: config.selection_mosaics, Split.TEST: config.test_mosaics}
    for split, mosaics in wanted.items():
        assert {question.sample.name for question in mosaic_questions(split, mosaics)} <= table.rows.keys()
    assert (ASSET / TABLE).stat().st_size < 2e6


def test_the_model_still_gives_the_precomputed_answers(executor, table):
    chance = random.Random(11)
    asked = [question for split in Split for question in chance.sample(mosaic_questions(split, 12), 8)]
    requests = [AnswerRequest(question.sample, chance.choice(EVERY)) for question in asked]
    answers, _ = executor.answer(requests)
    for request, answer in zip(requests, answers, strict=True):
        assert table.get(request.sample.name, request.knobs) == answer.tokens
        assert table.get_all(request.sample.name)[EVERY.index(request.knobs)] == answer.tokens


def test_a_table_of_another_model_is_ignored(tmp_path):
    for name in ("model.safetensors", "importance.json"):
        (tmp_path / name).write_text("one model")
    names, tokens = ["00" * 16, "0f" * 16], np.arange(2 * len(EVERY), dtype=np.int64).reshape(2, -1) % 200
    save_answer_table(names, tokens.astype(np.uint8), folder=tmp_path)
    result = load_answer_table(OPTIONS, tmp_path)
    assert result.get("0f" * 16, EVERY[3]) == (int(tokens[1, 3]),)
    assert result.get("11" * 16, EVERY[3]) is result.get_all("11" * 16) is None
    (tmp_path / "model.safetensors").write_text("the next model")
    assert load_answer_table(OPTIONS, tmp_path) is None


def test_the_dense_pass_equals_the_executor(executor):
    """Two mosaics under a few of the paths, among them dropped blocks and a late insertion position."""
    questions = mosaic_questions(Split.SELECT, 2, seed=5)
    few = type(OPTIONS)(
        crops_by_tier={"low": OPTIONS.crops_by_tier["low"]},
        total_blocks=OPTIONS.total_blocks,
        full_top_k=OPTIONS.full_top_k,
        drop_order=OPTIONS.drop_order,
        insertion_positions=(1, 5),
        max_dropped_blocks=1,
        smallest_top_k=OPTIONS.full_top_k - 1,
    )
    result = answer_every_configuration(executor.adapter.model, few, questions)
    requests = [AnswerRequest(question.sample, knobs) for question in questions for knobs in few.configurations()]
    answers, _ = Executor(executor.adapter, few).answer(requests)
    assert result.flatten().tolist() == [answer.tokens[0] for answer in answers]
