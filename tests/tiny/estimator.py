"""An estimator with given coefficients, as if fitted on a machine that keeps them exactly."""

from __future__ import annotations

from typing import Any

import numpy as np

from groupwise.latency.estimator import LatencyEstimator
from groupwise.latency.machine import current_machine
from groupwise.latency.records import DECODE, PREFILL, VISION
from groupwise.latency.regression import INTERCEPT
from groupwise.workloads.controller.latency.estimates import architecture_fingerprint


def fixed_estimator(model: Any) -> LatencyEstimator:
    """1 ms a crop; 0.5 ms a block and 0.01 ms a token-expert pair, of the prompt and of every step; a tenth at most."""
    work = {"blocks": 0.5, "expert_pairs": 0.01, "attended": 0.0, INTERCEPT: 0.0}
    prices = {
        VISION: {"crops": 1.0, "tokens": 0.0, INTERCEPT: 0.0},
        PREFILL: {"tokens": 0.0, "block_tokens": 0.0, **work},
        DECODE: {"steps": 0.0, **work},
    }
    ratios = np.repeat([1.0, 1.1], [90, 30])
    return LatencyEstimator(prices, {}, ratios, architecture_fingerprint(model), current_machine())
