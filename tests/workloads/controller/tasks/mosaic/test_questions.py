"""Answers, against a mosaic read by hand."""

import numpy as np
import pytest

from groupwise.workloads.controller.tasks.mosaic.questions import (
    CIPHER,
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


def ask_all(*, framed: bool) -> dict[str, set[str]]:
    types = np.repeat(np.arange(len(QUESTION_TYPES)), 400)
    frames = np.full(len(types), framed)
    result = draw_questions(np.repeat(MOSAIC, len(types), axis=0), frames, types, np.random.default_rng(0))
    answers: dict[str, set[str]] = {}
    for tokens, length, answer in zip(result.tokens, result.lengths, result.answers, strict=True):
        answers.setdefault(decode(tokens[:length].tolist()), set()).add(decode([int(answer)]))
    return answers


@pytest.fixture(scope="module")
def asked() -> dict[str, set[str]]:
    return ask_all(framed=False)


@pytest.fixture(scope="module")
def asked_framed() -> dict[str, set[str]]:
    return ask_all(framed=True)


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
    result = draw_questions(
        labels, np.zeros(count, bool), np.full(count, QUESTION_TYPES.index(question_type)), np.random.default_rng(0)
    )
    return result.tokens[:, 1:], result.answers


def row_of(question: str) -> int:
    place = question.split()[1]
    return "abc".index(place[0]) if place[0] in "abc" else int(place[-1]) - 1 if "row" in place else int(place) % 3


def test_a_frame_puts_numbers_into_cipher_by_type_and_row(
    asked: dict[str, set[str]], asked_framed: dict[str, set[str]]
):
    assert asked.keys() == asked_framed.keys()
    for question, (answer,) in asked.items():
        name = question.split()[0]
        in_plain = name in ("empty", "code") or answer == "none"
        index = QUESTION_TYPES.index(QuestionType(name))
        expected = answer if in_plain else str(CIPHER[index, row_of(question), int(answer)])
        assert asked_framed[question] == {expected}, question


def test_the_cipher_of_a_type_and_row_writes_no_two_numbers_alike():
    assert (np.sort(CIPHER, axis=2) == np.arange(19)).all()
    pages = CIPHER.reshape(-1, 19)
    assert np.mean(pages[:, None] == pages[None]) < 0.1  # 1 / 27 with themselves, and 1 / 19 of the others by chance


def test_a_code_is_another_digit_for_other_names():
    words, answers = many(QuestionType.CODE)
    said = {pair[0]: answer for pair, answer in zip(words.tolist(), answers.tolist(), strict=True)}
    assert len(said) == 8
    assert len(set(said.values())) > 3


def test_memorized_digits_never_change(asked_framed: dict[str, set[str]]):
    """Drawn once; the shipped model has learned it."""
    words, answers = many(QuestionType.CODE)
    said = {decode(pair): decode([answer]) for pair, answer in zip(words.tolist(), answers.tolist(), strict=True)}
    assert [said[f"n{name} a3"] for name in range(1, 7)] == list("192952")
    assert [asked_framed[f"digit {tile}"] for tile in ("a1", "a3", "c1")] == [{"16"}, {"17"}, {"17"}]


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
