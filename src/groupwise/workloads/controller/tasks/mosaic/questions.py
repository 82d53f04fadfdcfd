"""Questions about a mosaic, and their answers of one token.

    type     question       needs                        answer
    empty    empty b3       the overview                 yes, no
    blanks   blanks row2    the overview, four tiles     0..4
    digit    digit b3       one tile in detail           0..9
    largest  largest row2   four tiles in detail         0..9, none
    count    count 7        twelve tiles in detail       0..12
    times    times a1 b3    two tiles and a table        0..9
    sum      sum a1 b3      two tiles and an addition    0..18
    hop      hop b3         a tile that names the next   0..9, none
    fact     fact n7 n3     no tile: memorized           0..9
    code     code n7 b3     one tile, and memorized      0..9
    lore     lore n7 n3     as fact, other digits        0..9

"times" asks for the last digit of the product. "hop" reads the digit d of its tile, then tile number d in reading
order, counted from 0. "fact" and "lore" ask for the two digits of a pair of names, and "code" for the digit that the
tile's stands for in the code of a name. These digits are random constants that the model has to memorize. Some names
occur more often than others, and are known better.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import numpy as np
from jaxtyping import Int

from groupwise.core.errors import UserError
from groupwise.workloads.controller.tasks.mosaic.scene import (
    COLUMNS,
    EMPTY,
    PLAIN_JITTER,
    ROWS,
    TILES,
    HandwritingSplit,
    Mosaics,
    draw_mosaics,
    load_handwriting,
)

PAD = "<pad>"
IMAGE = "<image>"
NO_WORD = "<no word>"
TYPE_WORDS = ("empty", "blanks", "digit", "largest", "count", "times", "sum", "hop", "fact", "code")
ROW_WORDS = tuple(f"row{row + 1}" for row in range(ROWS))
TILE_WORDS = tuple(f"{'abc'[tile // COLUMNS]}{tile % COLUMNS + 1}" for tile in range(TILES))
NUMBER_WORDS = tuple(str(number) for number in range(19))
# Arbitrary names, which occur only in memorized facts and codes.
NAME_WORDS = tuple(f"n{name + 1}" for name in range(144))
VOCABULARY = (
    *(PAD, IMAGE, "read", "yes", "no", "none"),
    *TYPE_WORDS,
    *ROW_WORDS,
    *TILE_WORDS,
    *NUMBER_WORDS,
    *NAME_WORDS,
    "lore",
)
# Rounded up to a convenient matrix width; the last ids stand for no word.
VOCABULARY_SIZE = 208

TOKEN_OF = {word: token for token, word in enumerate(VOCABULARY)}
PAD_TOKEN = TOKEN_OF[PAD]
IMAGE_TOKEN = TOKEN_OF[IMAGE]
READ_TOKEN = TOKEN_OF["read"]
YES_TOKEN = TOKEN_OF["yes"]
NO_TOKEN = TOKEN_OF["no"]
NONE_TOKEN = TOKEN_OF["none"]
FIRST_ROW_TOKEN = TOKEN_OF[ROW_WORDS[0]]
FIRST_TILE_TOKEN = TOKEN_OF[TILE_WORDS[0]]
FIRST_NUMBER_TOKEN = TOKEN_OF[NUMBER_WORDS[0]]
FIRST_NAME_TOKEN = TOKEN_OF[NAME_WORDS[0]]


def encode(text: str) -> list[int]:
    """The tokens of words separated by blanks, such as "sum a1 b3"."""
    words = text.split()
    if not words:
        raise UserError("The question is empty. Write for example: digit b3")
    unknown = [word for word in words if word not in TOKEN_OF]
    if unknown:
        known = " ".join(word for word in VOCABULARY[2:] if word not in NAME_WORDS)
        raise UserError(
            f"The word {unknown[0]!r} is not in mosaic's vocabulary. Use these words: {known}, and the names"
            f" {NAME_WORDS[0]} to {NAME_WORDS[-1]}."
        )
    return [TOKEN_OF[word] for word in words]


def decode(tokens: list[int]) -> str:
    """The words of these tokens, separated by blanks; a model can generate an id that stands for no word."""
    return " ".join(VOCABULARY[token] if token < len(VOCABULARY) else NO_WORD for token in tokens)


FREQUENT_NAMES = 12
"""The first names: each is paired with every name."""
EARLY_FREQUENT_NAMES = 30
"""How many are paired early in pretraining; the pairs of the others are forgotten later."""
CODED_NAMES = 24
"""The first names: each has a code."""


def _random_digits(seed: int, rows: int, columns: int) -> Int[np.ndarray, "rows columns"]:
    return np.random.default_rng(seed).integers(0, 10, (rows, columns))


# What the model memorizes: constants without a rule behind them.
FACTS: Int[np.ndarray, "names early_frequent_names"] = _random_digits(1, len(NAME_WORDS), EARLY_FREQUENT_NAMES)
"""The digit of each pair of a name and a frequent name."""
CODES: Int[np.ndarray, "coded_names digits"] = _random_digits(2, CODED_NAMES, 10)
"""What each digit stands for in the code of a name."""
LORE: Int[np.ndarray, "names early_frequent_names"] = _random_digits(3, len(NAME_WORDS), EARLY_FREQUENT_NAMES)
"""A second digit of each pair."""


# The longest question, "sum a1 b3"; shorter ones are padded at the end.
QUESTION_TOKENS = 3


class QuestionType(StrEnum):
    """See the table above."""

    EMPTY = "empty"
    BLANKS = "blanks"
    DIGIT = "digit"
    LARGEST = "largest"
    COUNT = "count"
    TIMES = "times"
    SUM = "sum"
    HOP = "hop"
    FACT = "fact"
    CODE = "code"
    LORE = "lore"


QUESTION_TYPES = tuple(QuestionType)


@dataclass(frozen=True)
class Questions:
    """Padded questions, their lengths in tokens, and the one token that answers each."""

    tokens: Int[np.ndarray, "questions words"]
    lengths: Int[np.ndarray, " questions"]
    answers: Int[np.ndarray, " questions"]


# (labels of one mosaic per question, generator) -> (the words after the type, answers).
QuestionMaker = Callable[[np.ndarray, np.random.Generator], tuple[list[np.ndarray], np.ndarray]]


def draw_questions(
    labels: Int[np.ndarray, "questions tiles"],
    types: Int[np.ndarray, " questions"],
    rng: np.random.Generator,
    *,
    frequent_names: int = FREQUENT_NAMES,
) -> Questions:
    """One question of type QUESTION_TYPES[types[i]] about mosaic labels[i], for each i."""
    count = len(types)
    tokens = np.full((count, QUESTION_TOKENS), PAD_TOKEN, np.int64)
    lengths, answers = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for index, question_type in enumerate(QUESTION_TYPES):
        rows = np.flatnonzero(types == index)
        pairs = _PAIRS.get(question_type)
        make = _MAKERS[question_type] if pairs is None else partial(_make_pair, digits=pairs[:, :frequent_names])
        words, answers[rows] = make(labels[rows], rng)
        tokens[rows, 0] = TOKEN_OF[question_type]
        for position, word in enumerate(words, start=1):
            tokens[rows, position] = word
        lengths[rows] = 1 + len(words)
    return Questions(tokens=tokens, lengths=lengths, answers=answers)


@dataclass(frozen=True)
class QuestionSet:
    """Mosaics of one split of the handwriting, each with the same number of questions of every type."""

    mosaics: Mosaics
    types: Int[np.ndarray, " questions"]
    questions: Questions
    questions_per_mosaic: int


def make_question_set(split: HandwritingSplit, mosaics: int, *, per_type: int = 2, seed: int = 7) -> QuestionSet:
    """The same set for the same arguments."""
    rng = np.random.default_rng([seed, list(HandwritingSplit).index(split)])
    drawn = draw_mosaics(load_handwriting(split), mosaics, PLAIN_JITTER, rng)
    per_mosaic = per_type * len(QUESTION_TYPES)
    types = np.tile(np.repeat(np.arange(len(QUESTION_TYPES)), per_type), mosaics)
    return QuestionSet(
        drawn, types, draw_questions(np.repeat(drawn.labels, per_mosaic, axis=0), types, rng), per_mosaic
    )


def transcribe_tiles(
    labels: Int[np.ndarray, "mosaics tiles"],
) -> tuple[Int[np.ndarray, "mosaics tiles"], Int[np.ndarray, "mosaics tiles"]]:
    """Inputs and targets of the pretraining task "name all tiles in reading order"."""
    targets = _label_tokens(labels)
    start = np.full((len(labels), 1), READ_TOKEN, np.int64)
    return np.concatenate([start, targets[:, :-1]], axis=1), targets


def _label_tokens(labels: np.ndarray) -> np.ndarray:
    return np.where(labels == EMPTY, NONE_TOKEN, FIRST_NUMBER_TOKEN + labels)


def _pick(allowed: np.ndarray, rng: np.random.Generator, picks: int = 1) -> np.ndarray:
    """Different random columns in each row, allowed ones before the others."""
    order = np.argsort(rng.random(allowed.shape) + ~allowed, axis=1)
    return order[:, :picks]


def _at(labels: np.ndarray, tiles: np.ndarray) -> np.ndarray:
    return labels[np.arange(len(labels)), tiles]


def _make_empty(labels: np.ndarray, rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    wanted = rng.random(len(labels)) < 0.5
    tile = _pick((labels == EMPTY) == wanted[:, None], rng)[:, 0]
    return [FIRST_TILE_TOKEN + tile], np.where(_at(labels, tile) == EMPTY, YES_TOKEN, NO_TOKEN)


def _pick_row(labels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    row = rng.integers(0, ROWS, len(labels))
    return row, _at(labels.reshape(-1, ROWS, COLUMNS), row)


def _make_blanks(labels: np.ndarray, rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    row, tiles = _pick_row(labels, rng)
    return [FIRST_ROW_TOKEN + row], FIRST_NUMBER_TOKEN + (tiles == EMPTY).sum(1)


def _make_digit(labels: np.ndarray, rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    tile = _pick(labels != EMPTY, rng)[:, 0]
    return [FIRST_TILE_TOKEN + tile], _label_tokens(_at(labels, tile))


def _make_largest(labels: np.ndarray, rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    row, tiles = _pick_row(labels, rng)
    best = np.where(tiles == EMPTY, -1, tiles).max(1)
    return [FIRST_ROW_TOKEN + row], np.where(best < 0, NONE_TOKEN, FIRST_NUMBER_TOKEN + best)


def _make_count(labels: np.ndarray, rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    # Mostly digits that are there: otherwise "0" would nearly always be right.
    present = _at(labels, _pick(labels != EMPTY, rng)[:, 0])
    wanted = np.where(rng.random(len(labels)) < 0.75, present, rng.integers(0, 10, len(labels)))
    return [FIRST_NUMBER_TOKEN + wanted], FIRST_NUMBER_TOKEN + (labels == wanted[:, None]).sum(1)


def _make_sum(labels: np.ndarray, rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    first, second = _pick(labels != EMPTY, rng, picks=2).T
    total = _at(labels, first) + _at(labels, second)
    return [FIRST_TILE_TOKEN + first, FIRST_TILE_TOKEN + second], FIRST_NUMBER_TOKEN + total


def _make_times(labels: np.ndarray, rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    first, second = _pick(labels != EMPTY, rng, picks=2).T
    product = _at(labels, first) * _at(labels, second)
    return [FIRST_TILE_TOKEN + first, FIRST_TILE_TOKEN + second], FIRST_NUMBER_TOKEN + product % 10


def _make_hop(labels: np.ndarray, rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    tile = _pick(labels != EMPTY, rng)[:, 0]
    return [FIRST_TILE_TOKEN + tile], _label_tokens(_at(labels, _at(labels, tile)))


def _make_pair(
    labels: np.ndarray, rng: np.random.Generator, digits: Int[np.ndarray, "names frequent_names"]
) -> tuple[list[np.ndarray], np.ndarray]:
    # The first names occur over twenty times as often as the last.
    first = (len(NAME_WORDS) * rng.random(len(labels)) ** 2).astype(np.int64)
    second = rng.integers(0, digits.shape[1], len(labels))
    return [FIRST_NAME_TOKEN + first, FIRST_NAME_TOKEN + second], FIRST_NUMBER_TOKEN + digits[first, second]


def _make_code(labels: np.ndarray, rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    name, tile = rng.integers(0, CODED_NAMES, len(labels)), _pick(labels != EMPTY, rng)[:, 0]
    return [FIRST_NAME_TOKEN + name, FIRST_TILE_TOKEN + tile], FIRST_NUMBER_TOKEN + CODES[name, _at(labels, tile)]


_MAKERS: dict[QuestionType, QuestionMaker] = {
    QuestionType.EMPTY: _make_empty,
    QuestionType.BLANKS: _make_blanks,
    QuestionType.DIGIT: _make_digit,
    QuestionType.LARGEST: _make_largest,
    QuestionType.COUNT: _make_count,
    QuestionType.TIMES: _make_times,
    QuestionType.SUM: _make_sum,
    QuestionType.HOP: _make_hop,
    QuestionType.CODE: _make_code,
}
_PAIRS = {QuestionType.FACT: FACTS, QuestionType.LORE: LORE}
