"""The shipped model under the executor answers as it does alone through transformers."""

import random

import pytest
import torch
from tiny.mosaic import answer_logits, configured
from torch.testing import assert_close

from groupwise.workloads.controller.model.adapters import LlavaAdapter
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor
from groupwise.workloads.controller.model.knobs import Knobs
from groupwise.workloads.controller.tasks.mosaic.model import load_mosaic, mosaic_options, mosaic_sample
from groupwise.workloads.controller.tasks.mosaic.questions import make_question_set
from groupwise.workloads.controller.tasks.mosaic.scene import HandwritingSplit, Tier

QUESTIONS, OPTIONS = make_question_set(HandwritingSplit.TEST, 4), mosaic_options()


def question(number: int) -> list[int]:
    return QUESTIONS.questions.tokens[number, : QUESTIONS.questions.lengths[number]].tolist()


@pytest.fixture(scope="module")
def model():
    return load_mosaic()


@pytest.fixture(scope="module")
def samples():
    asked = QUESTIONS.questions_per_mosaic
    return [mosaic_sample(QUESTIONS.mosaics.pixels[number // asked], question(number)) for number in range(4 * asked)]


@torch.inference_mode()
def test_twenty_answers_together_are_those_of_transformers_alone(model, samples):
    every, chance = list(OPTIONS.configurations()), random.Random(3)
    requests = [AnswerRequest(chance.choice(samples), chance.choice(every)) for _ in range(20)]
    answers, _ = Executor(LlavaAdapter(model), OPTIONS).answer(requests)
    for request, answer in zip(requests, answers, strict=True):
        knobs, path = request.knobs, OPTIONS.block_path(request.knobs)
        kept = [block for block, top_k in enumerate(path) if top_k]
        with configured(model, kept, knobs.top_k, knobs.insertion_position):
            alone = answer_logits(
                model, request.sample.crops_by_tier[knobs.tier], request.sample.question_ids, Tier(knobs.tier)
            )
        assert answer.tokens == (int(alone.argmax()),)
        assert_close(answer.first_logits, alone, rtol=0, atol=1e-4)


def test_the_full_configuration_is_right_under_the_executor(model, samples):
    answers, _ = Executor(LlavaAdapter(model), OPTIONS).answer(
        [AnswerRequest(sample, OPTIONS.full) for sample in samples]
    )
    right = [answer.tokens[0] == int(truth) for answer, truth in zip(answers, QUESTIONS.questions.answers, strict=True)]
    assert sum(right) / len(right) > 0.75


def test_samples_are_named_by_their_content():
    one, other = QUESTIONS.mosaics.pixels[0], QUESTIONS.mosaics.pixels[1]
    names = {mosaic_sample(pixels, asked).name for pixels in (one, other) for asked in ([3, 4], [3, 5])}
    assert len(names) == 4
    assert mosaic_sample(one, [3, 4]).name == mosaic_sample(one.clone(), (3, 4)).name
    assert OPTIONS.full == Knobs("high", 1, 8, 12)
    assert OPTIONS.cheapest == Knobs("low", 1, 4, 8)
