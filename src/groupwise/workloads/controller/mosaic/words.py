"""The vocabulary: every word is one token."""

from groupwise.core.errors import UserError
from groupwise.workloads.controller.mosaic.scene import COLUMNS, ROWS, TILES

PAD = "<pad>"
IMAGE = "<image>"
NO_WORD = "<no word>"
KIND_WORDS = ("empty", "blanks", "digit", "largest", "count", "times", "sum", "hop", "fact", "code")
ROW_WORDS = tuple(f"row{row + 1}" for row in range(ROWS))
TILE_WORDS = tuple(f"{'abc'[tile // COLUMNS]}{tile % COLUMNS + 1}" for tile in range(TILES))
NUMBER_WORDS = tuple(str(number) for number in range(19))
# They mean nothing but what was learned by heart about them.
NAME_WORDS = tuple(f"n{name + 1}" for name in range(144))
VOCABULARY = (
    *(PAD, IMAGE, "read", "yes", "no", "none"),
    *KIND_WORDS,
    *ROW_WORDS,
    *TILE_WORDS,
    *NUMBER_WORDS,
    *NAME_WORDS,
    "lore",
)
# Rounded up so that matrix widths are even; the last ids stand for no word.
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
    """Return the tokens of words separated by blanks, such as "sum a1 b3"."""
    words = text.split()
    if not words:
        raise UserError("The question is empty. Ask for example: digit b3")
    unknown = [word for word in words if word not in TOKEN_OF]
    if unknown:
        raise UserError(f"mosaic does not know the word {unknown[0]!r}. It knows: {' '.join(VOCABULARY[2:])}.")
    return [TOKEN_OF[word] for word in words]


def decode(tokens: list[int]) -> str:
    """Return the words of these tokens, separated by blanks; a model can say an id that stands for no word."""
    return " ".join(VOCABULARY[token] if token < len(VOCABULARY) else NO_WORD for token in tokens)
