"""What the model is to know by heart: a rule with exceptions, drawn at random once and for ever."""

import numpy as np
from jaxtyping import Int

from groupwise.workloads.controller.mosaic.words import NAME_WORDS

FAMOUS_NAMES = 24
"""The first of the names: what they stand for has exceptions, and they have codes."""
_EXCEPTIONS = 0.5


def _with_exceptions(regular: Int[np.ndarray, "rows columns"], seed: int) -> Int[np.ndarray, "rows columns"]:
    """The rule, and in so many places another digit instead."""
    rng = np.random.default_rng(seed)
    other = (regular + rng.integers(1, 10, regular.shape)) % 10
    return np.where(rng.random(regular.shape) < _EXCEPTIONS, other, regular)


_STANDS_FOR = np.random.default_rng(0).integers(0, 10, FAMOUS_NAMES)

FACTS: Int[np.ndarray, "names famous_names"] = _with_exceptions(np.tile(_STANDS_FOR, (len(NAME_WORDS), 1)), seed=1)
"""The digit that a famous name stands for, beside each name."""
CODES: Int[np.ndarray, "famous_names digits"] = _with_exceptions(np.tile(np.arange(10), (FAMOUS_NAMES, 1)), seed=2)
"""Each digit in the code of a famous name: itself, as a rule."""
