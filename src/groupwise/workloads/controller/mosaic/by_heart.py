"""What the model is to know by heart: digits drawn at random once and for ever, with no rule to fall back on."""

import numpy as np
from jaxtyping import Int

from groupwise.workloads.controller.mosaic.words import NAME_WORDS

FAMOUS_NAMES = 12
"""The first of the names: each is paired with every name."""
ONCE_FAMOUS_NAMES = 30
"""Early in training so many are; what is asked of the others is forgotten later."""
CODED_NAMES = 24
"""The first of the names: each has a code."""


def _drawn(seed: int, rows: int, columns: int) -> Int[np.ndarray, "rows columns"]:
    return np.random.default_rng(seed).integers(0, 10, (rows, columns))


FACTS: Int[np.ndarray, "names once_famous_names"] = _drawn(1, len(NAME_WORDS), ONCE_FAMOUS_NAMES)
"""The digit of each pair of a name and a famous one."""
CODES: Int[np.ndarray, "coded_names digits"] = _drawn(2, CODED_NAMES, 10)
"""What each digit is in the code of such a name."""
LORE: Int[np.ndarray, "names once_famous_names"] = _drawn(3, len(NAME_WORDS), ONCE_FAMOUS_NAMES)
"""The other digit of each pair."""
