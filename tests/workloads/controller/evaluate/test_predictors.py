"""Predictors learn what their inputs tell, and nothing else."""

from types import SimpleNamespace

import torch

from groupwise.workloads.controller.evaluate.baselines import choose
from groupwise.workloads.controller.evaluate.exact import EvaluationSet
from groupwise.workloads.controller.evaluate.predictors import join, train_predictor, words_of
from workloads.controller.evaluate.tiny_sets import evaluation_set

EACH_ALONE = list(range(4))


def pixels(questions):
    """What a picture looks like: dark or bright."""
    return torch.tensor([[question.brightness] for question in questions])


def asked(pictures):
    """Of each picture two questions, with word 5 and with word 6. Word 5 needs the second configuration, word 6 the
    third in dark pictures and the fourth in bright ones."""
    plain = evaluation_set(
        "ab" * pictures, [[0] * 4] * 2 * pictures, pictures=[str(i // 2) for i in range(2 * pictures)]
    )
    needs = []
    for index, question in enumerate(plain.questions):
        question.brightness = float(index // 2 % 2)
        question.sample = SimpleNamespace(name=str(index), question_ids=(5 + index % 2, 9))
        needs.append(1 if index % 2 == 0 else 2 + index // 2 % 2)
    accuracy = torch.nn.functional.one_hot(torch.tensor(needs), 4).double()
    return EvaluationSet(plain.conditions, plain.candidates, accuracy, plain.median_ms, plain.upper_ms)


FIT, TEST = asked(60), asked(8)
WORDS = words_of(FIT.questions)


def accuracy(predictor):
    """Under a budget that everything fits."""
    return float(TEST.accuracy_of(choose(predictor(TEST.questions), TEST))[:, 1].mean())


def test_a_predictor_learns_what_words_and_picture_tell_and_words_alone_do_not():
    everything = train_predictor(FIT, join(WORDS, pixels), EACH_ALONE, steps=200)
    assert accuracy(everything) == 1
    words = train_predictor(FIT, WORDS, EACH_ALONE, steps=200)
    assert accuracy(words) == 0.75  # word 6 gets one configuration in all pictures
    seen = [WORDS(TEST.questions), torch.cat([WORDS([question]) for question in TEST.questions])]
    assert torch.equal(*seen)
    assert (words(TEST.questions)[1::2] == words(TEST.questions)[1]).all()


def test_the_same_seed_trains_the_same_predictor_and_leaves_the_callers_random_numbers_alone():
    state = torch.random.get_rng_state()
    first, again, other = (train_predictor(FIT, WORDS, EACH_ALONE, steps=20, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first(TEST.questions), again(TEST.questions))
    assert not torch.equal(first(TEST.questions), other(TEST.questions))


def test_untrained_it_predicts_the_mean_accuracy_and_with_a_base_what_that_one_predicts():
    plain = train_predictor(FIT, WORDS, EACH_ALONE, steps=0)
    # a half, a quarter and a quarter of the pictures that are not held out
    predicted = plain(TEST.questions)
    assert torch.equal(predicted[0], predicted[1])
    assert predicted[0, 1] == 0.5
    assert (predicted[0, 2:] - 0.25).abs().max() < 0.05
    base = train_predictor(FIT, WORDS, EACH_ALONE, steps=200)
    assert torch.equal(
        train_predictor(FIT, pixels, EACH_ALONE, steps=0, base=base)(TEST.questions), base(TEST.questions)
    )
    more = train_predictor(FIT, join(WORDS, pixels), EACH_ALONE, steps=200, base=base)
    assert accuracy(more) == 1


def test_unknown_answers_are_left_out_and_equal_candidates_share_a_prediction():
    accuracy = FIT.accuracy.clone()
    accuracy[: len(accuracy) // 2, 1] = torch.nan
    partly = EvaluationSet(FIT.conditions, FIT.candidates, accuracy, FIT.median_ms, FIT.upper_ms)
    predicted = train_predictor(partly, WORDS, [0, 1, 2, 2], steps=200)(TEST.questions)
    assert predicted.isfinite().all()
    assert (predicted[::2, 1] > 0.9).all()
    assert torch.equal(predicted[:, 2], predicted[:, 3])


def test_words_that_were_never_asked_are_ignored():
    new = SimpleNamespace(sample=SimpleNamespace(question_ids=(5, 77)))
    assert WORDS([new]).tolist() == [[1.0, 0.0, 0.0]]  # of the words 5, 6 and 9
