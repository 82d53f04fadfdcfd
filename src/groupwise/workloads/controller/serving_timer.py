"""The time of answers as a controller gives them, for an estimator that is to keep its budgets.

Whatever the controller has learned, choosing takes it the same time; so an untrained one is timed, left with a single
choice.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from groupwise.meter.latency import Measured
from groupwise.meter.parts import find_parts
from groupwise.meter.spans import Meter
from groupwise.workloads.controller.decisions import Controller
from groupwise.workloads.controller.estimates import table_shape
from groupwise.workloads.controller.executor import Executor, Request
from groupwise.workloads.controller.features import Features
from groupwise.workloads.controller.policy import Policy
from groupwise.workloads.controller.serve import Allowance, Server

_SHARE = 0.5


class ServingTimer:
    """Times one answer with given knobs: both choices, the pass up to the second one, and the rest."""

    def __init__(self, executor: Executor, *, clock: Callable[[], float] = time.perf_counter):
        features = Features(executor)
        device = features.executor.adapter.model.device
        policy = Policy(features.width, executor.options).to(device)
        self._controller = Controller(policy, features, device)
        self._number = {knobs: number for number, knobs in enumerate(executor.options.all())}
        self._servers: dict[int, Server] = {}
        self._meter = Meter(find_parts(executor.adapter.model), clock=clock)

    def __call__(self, executor: Executor, request: Request, new_tokens: int) -> Measured:
        promised = torch.full((len(self._number),), torch.inf, dtype=torch.float64)
        promised[self._number[request.knobs]] = 1.0
        only = Allowance(limit_ms=1.0, share=_SHARE, promised_ms=promised.view(table_shape(executor.options)))
        if new_tokens not in self._servers:
            self._servers[new_tokens] = Server(self._controller, max_new_tokens=new_tokens)
        return self._meter.time(lambda: self._servers[new_tokens].serve(request.sample, only))
