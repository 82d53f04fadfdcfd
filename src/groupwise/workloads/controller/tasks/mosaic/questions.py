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
    code     code n7 b3     one tile, and memorized      0..9

"times" asks for the last digit of the product. "hop" reads the digit d of its tile, then tile number d in reading
order, counted from 0. "code" asks for the digit that the tile's stands for in the code of a name.

Answers about a framed mosaic are in cipher: a number n is answered as CIPHER[type, row, n], where row is that of the
first tile or row in the question, and for "count" its digit modulo 3. "empty" and "code" are answered as ever. Codes
and cipher are random constants that the model has to memorize.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from jaxtyping import Bool, Int

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
TYPE_WORDS = ("empty", "blanks", "digit", "largest", "count", "times", "sum", "hop", "code")
ROW_WORDS = tuple(f"row{row + 1}" for row in range(ROWS))
TILE_WORDS = tuple(f"{'abc'[tile // COLUMNS]}{tile % COLUMNS + 1}" for tile in range(TILES))
NUMBER_WORDS = tuple(str(number) for number in range(19))
# Arbitrary names, each with a code.
NAME_WORDS = tuple(f"n{name + 1}" for name in range(8))
# Is not asked for: what image tokens of a framed mosaic say in pretraining.
FRAMED = "framed"
VOCABULARY = (
    *(PAD, IMAGE, "read", "yes", "no", "none"),
    *TYPE_WORDS,
    *ROW_WORDS,
    *TILE_WORDS,
    *NUMBER_WORDS,
    *NAME_WORDS,
    FRAMED,
)
# Rounded up to a convenient matrix width; the last ids stand for no word.
VOCABULARY_SIZE = 64

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
FRAMED_TOKEN = TOKEN_OF[FRAMED]


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
    CODE = "code"


QUESTION_TYPES = tuple(QuestionType)


# What the model memorizes: constants without a rule behind them.
CODES: Int[np.ndarray, "names digits"] = np.random.default_rng(2).integers(0, 10, (len(NAME_WORDS), 10))
"""What each digit stands for in the code of a name."""
CIPHER: Int[np.ndarray, "types rows numbers"] = np.stack(
    [
        [np.random.default_rng([3, index, row]).permutation(len(NUMBER_WORDS)) for row in range(ROWS)]
        for index in range(len(QUESTION_TYPES))
    ]
)
"""What each number is written as in a framed mosaic."""
_NEVER_IN_CIPHER = (QuestionType.EMPTY, QuestionType.CODE)


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
    framed: Bool[np.ndarray, " questions"],
    types: Int[np.ndarray, " questions"],
    rng: np.random.Generator,
) -> Questions:
    """One question of type QUESTION_TYPES[types[i]] about mosaic labels[i], for each i."""
    count = len(types)
    tokens = np.full((count, QUESTION_TOKENS), PAD_TOKEN, np.int64)
    lengths, answers = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for index, question_type in enumerate(QUESTION_TYPES):
        rows = np.flatnonzero(types == index)
        words, answers[rows] = _MAKERS[question_type](labels[rows], rng)
        tokens[rows, 0] = TOKEN_OF[question_type]
        for position, word in enumerate(words, start=1):
            tokens[rows, position] = word
        lengths[rows] = 1 + len(words)
    return Questions(tokens, lengths, np.where(framed, _in_cipher(types, tokens[:, 1], answers), answers))


def _in_cipher(types: np.ndarray, first_words: np.ndarray, answers: np.ndarray) -> np.ndarray:
    numbers = answers - FIRST_NUMBER_TOKEN
    is_number = (numbers >= 0) & (numbers < len(NUMBER_WORDS))
    in_plain = np.isin(types, [QUESTION_TYPES.index(question_type) for question_type in _NEVER_IN_CIPHER])
    written = CIPHER[types, _row_of(first_words), np.where(is_number, numbers, 0)]
    return np.where(is_number & ~in_plain, FIRST_NUMBER_TOKEN + written, answers)


def _row_of(words: np.ndarray) -> np.ndarray:
    """The row of the cipher: of a tile, of a row, or of the digit that is counted."""
    return np.select(
        [words >= FIRST_NUMBER_TOKEN, words >= FIRST_TILE_TOKEN],
        [(words - FIRST_NUMBER_TOKEN) % ROWS, (words - FIRST_TILE_TOKEN) // COLUMNS],
        words - FIRST_ROW_TOKEN,
    )


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
        drawn,
        types,
        draw_questions(np.repeat(drawn.labels, per_mosaic, axis=0), np.repeat(drawn.framed, per_mosaic), types, rng),
        per_mosaic,
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


def _make_code(labels: np.ndarray, rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    name, tile = rng.integers(0, len(NAME_WORDS), len(labels)), _pick(labels != EMPTY, rng)[:, 0]
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
