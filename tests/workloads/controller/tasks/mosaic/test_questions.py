"""Answers, against a mosaic read by hand."""

from collections import Counter

import numpy as np
import pytest

from groupwise.workloads.controller.tasks.mosaic.questions import (
    QUESTION_TYPES,
    TOKEN_OF,
    VOCABULARY_SIZE,
    QuestionType,
    decode,
    draw_questions,
    encode,
    transcribe_tiles,
)
from groupwise.workloads.controller.tasks.mosaic.scene import EMPTY

_ = 10  # an empty tile
#                   a1 a2 a3 a4  b1 b2 b3 b4  c1 c2 c3 c4
MOSAIC = np.array([[7, _, 2, 2, _, _, _, _, 3, 9, 2, 0]])
BY_HAND = {
    "empty a1": "no",
    "empty a2": "yes",
    "empty b4": "yes",
    "empty c4": "no",
    "blanks row1": "1",
    "blanks row2": "4",
    "blanks row3": "0",
    "digit a1": "7",
    "digit a3": "2",
    "digit a4": "2",
    "digit c1": "3",
    "digit c2": "9",
    "digit c3": "2",
    "digit c4": "0",
    "largest row1": "7",
    "largest row2": "none",
    "largest row3": "9",
    "count 2": "3",
    "count 7": "1",
    "count 5": "0",
    "sum a1 c2": "16",
    "sum a3 a4": "4",
    "sum c4 c1": "3",
    "times a1 c2": "3",  # 63
    "times c1 a3": "6",
    "times c4 a1": "0",
    "hop a1": "none",  # 7 -> b4
    "hop a3": "2",  # 2 -> a3
    "hop c1": "2",  # 3 -> a4
    "hop c2": "9",  # 9 -> c2
    "hop c4": "7",  # 0 -> a1
}


@pytest.fixture(scope="module")
def asked() -> dict[str, set[str]]:
    types = np.repeat(np.arange(len(QUESTION_TYPES)), 400)
    result = draw_questions(np.repeat(MOSAIC, len(types), axis=0), types, np.random.default_rng(0))
    answers: dict[str, set[str]] = {}
    for tokens, length, answer in zip(result.tokens, result.lengths, result.answers, strict=True):
        answers.setdefault(decode(tokens[:length].tolist()), set()).add(decode([int(answer)]))
    return answers


@pytest.mark.parametrize(("question", "answer"), BY_HAND.items())
def test_the_answer_is_the_one_found_by_hand(asked: dict[str, set[str]], question: str, answer: str):
    assert asked[question] == {answer}


def test_a_question_has_one_answer(asked: dict[str, set[str]]):
    assert all(len(answers) == 1 for answers in asked.values())
    assert {question.split()[0] for question in asked} == {name.value for name in QuestionType}


def test_only_tiles_with_a_digit_are_asked_for_it(asked: dict[str, set[str]]):
    for question in asked:
        first_word, *places = question.split()
        if first_word in ("digit", "times", "sum", "hop", "code"):
            assert not {"a2", "b1", "b2", "b3", "b4"} & set(places)


def test_sums_and_products_are_of_two_tiles(asked: dict[str, set[str]]):
    assert all(len(set(question.split())) == 3 for question in asked if question.startswith(("sum", "times")))


def many(question_type: QuestionType, count: int = 20_000) -> tuple[np.ndarray, np.ndarray]:
    """Tile a3 is a 2, and all others are empty: the two words of many questions, and what is answered."""
    labels = np.full((count, 12), EMPTY)
    labels[:, 2] = 2
    result = draw_questions(labels, np.full(count, QUESTION_TYPES.index(question_type)), np.random.default_rng(0))
    return result.tokens[:, 1:], result.answers


@pytest.mark.parametrize("question_type", [QuestionType.FACT, QuestionType.LORE])
def test_neither_name_tells_the_digit_of_a_pair(question_type: QuestionType):
    words, answers = many(question_type)
    said = {tuple(pair): answer for pair, answer in zip(words.tolist(), answers.tolist(), strict=True)}
    for place, fewest in ((0, 10), (1, 100)):
        by_name: dict[int, Counter[int]] = {}
        for pair, answer in said.items():
            by_name.setdefault(pair[place], Counter())[answer] += 1
        known = [max(counted.values()) / counted.total() for counted in by_name.values() if counted.total() >= fewest]
        assert np.mean(known) < 0.4  # the likeliest digit of a name, in hindsight


def test_a_code_is_another_digit_for_other_names():
    words, answers = many(QuestionType.CODE)
    said = {pair[0]: answer for pair, answer in zip(words.tolist(), answers.tolist(), strict=True)}
    assert len(said) == 24
    assert len(set(said.values())) > 5


def test_memorized_digits_never_change():
    """Drawn once; the shipped model has learned it."""
    for question_type, digits in ((QuestionType.FACT, list("457901")), (QuestionType.LORE, list("801218"))):
        words, answers = many(question_type)
        said = {decode(pair): decode([answer]) for pair, answer in zip(words.tolist(), answers.tolist(), strict=True)}
        assert [said[f"n1 n{second}"] for second in range(1, 7)] == digits


def test_the_first_quarter_of_the_names_is_asked_for_half_of_the_time():
    words, _ = many(QuestionType.FACT)
    assert np.mean(words[:, 0] < TOKEN_OF["n37"]) == pytest.approx(0.5, abs=0.02)


def test_a_transcription_names_each_tile_after_the_one_before():
    said, targets = transcribe_tiles(MOSAIC)
    assert decode(targets[0].tolist()) == "7 none 2 2 none none none none 3 9 2 0"
    assert decode(said[0].tolist()) == "read 7 none 2 2 none none none none 3 9 2"


def test_words_and_tokens_go_both_ways():
    assert decode(encode("sum a1 b3")) == "sum a1 b3"
    assert max(encode("18 c4 row3 hop")) < VOCABULARY_SIZE
    assert decode([TOKEN_OF["7"], VOCABULARY_SIZE - 1]) == "7 <no word>"


def test_an_unknown_word_is_named():
    with pytest.raises(ValueError, match="'d9'"):
        encode("digit d9")
    with pytest.raises(ValueError, match="empty"):
        encode("  ")
