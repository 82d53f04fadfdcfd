"""pass@k: the chance that at least one of k completions passes, without bias from n samples of which c passed."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt
from statistics import fmean, stdev

from groupwise.core.errors import require


def pass_at(k: int, *, samples: int, passed: int) -> float:
    """1 - C(n - c, k) / C(n, k): the share of all k-subsets of the n samples that hold a passed one.

    Chen et al., "Evaluating large language models trained on code", arXiv 2107.03374. The plain 1 - (1 - c/n)^k draws
    the same sample more than once, and is too low.
    """
    require(1 <= k <= samples, "k of pass@k", k, f"from 1 to the {samples} samples of a question")
    require(0 <= passed <= samples, "the number of passed samples", passed, f"from 0 to {samples}")
    return 1 - comb(samples - passed, k) / comb(samples, k)


def mean_pass_at(k: int, *, samples: int, passed: Sequence[int]) -> tuple[float, float]:
    """Over questions: the mean, and its standard error."""
    values = [pass_at(k, samples=samples, passed=count) for count in passed]
    return fmean(values), stdev(values) / sqrt(len(values)) if len(values) > 1 else float("nan")


def powers_up_to(samples: int) -> list[int]:
    """1, 2, 4, ... and the number of samples itself."""
    return sorted({*(2**n for n in range(samples.bit_length()) if 2**n <= samples), samples})
