"""One answer under a budget, as it is given in use: choose, look, choose again, go on. Nothing is remembered."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import gelu, linear

from groupwise.workloads.controller.adapter import Sample
from groupwise.workloads.controller.conditions import Conditions
from groupwise.workloads.controller.decisions import ORDER, Controller
from groupwise.workloads.controller.estimates import Table
from groupwise.workloads.controller.executor import Request
from groupwise.workloads.controller.knobs import Knobs
from groupwise.workloads.controller.policy import FIRST, SECOND, Head, even


@dataclass(frozen=True)
class Allowance:
    """What a question may take, in terms that the controller understands."""

    limit_ms: float
    """Infinite where the budget is only priced."""
    share: float
    """The budget between the cheapest configuration (0) and the full one (1)."""
    promised_ms: Table
    """What is held against the limit, for every configuration."""


def allowance_of(conditions: Conditions, row: int) -> Allowance:
    """Of one condition: what its budget lets the controller choose from."""
    rows = torch.tensor([row])
    free = not conditions.config.guaranteed and not bool(conditions.impossible[row])
    return Allowance(
        limit_ms=torch.inf if free else float(conditions.budget_ms[row]),
        share=float(conditions.budget_share[row]),
        promised_ms=conditions.promised_ms(rows)[0],
    )


@dataclass(frozen=True)
class Served:
    tokens: tuple[int, ...]
    knobs: Knobs
    choices: tuple[int, ...]
    """The same knobs as numbers of options."""
    stage_one_ms: float
    """Measured, with the masks and the mean embedding of the question; encoding a budget met before is remembered."""
    stage_two_ms: float

    @property
    def controller_ms(self) -> float:
        """The controller's own time."""
        return self.stage_one_ms + self.stage_two_ms


class Server:
    """A trained controller made ready for single requests: its weights as they are now, and budgets it has met.

    The choice is the network's own. What depends on the budget alone is computed once for each budget, and heads are
    joined: a third of the operations are left, and at this size an answer's time is a matter of their number.
    """

    def __init__(self, controller: Controller, *, max_new_tokens: int = 1, stop_token: int | None = None):
        self.features, self.policy, self.device = controller.features, controller.policy, controller.device
        self.executor, self.max_new_tokens, self.stop_token = self.features.executor, max_new_tokens, stop_token
        one, two = self.policy.stage_one, self.policy.stage_two
        with torch.no_grad():
            self._join_prompt, self._join_budget = (part.clone() for part in one.join.weight.split(FIRST, dim=1))
            self._first = _joined(one.tier, one.insertion, FIRST, self.device)
            self._second = _joined(two.top_k, two.blocks, SECOND, self.device)
        self._budgets: dict[float, tuple[Tensor, Tensor]] = {}

    @torch.inference_mode()
    def serve(self, sample: Sample, allowance: Allowance) -> Served:
        """The likeliest knobs that fit, and the model's answer under them.

        Only the chosen tier is looked at, and only the blocks up to the chosen position run before the second choice;
        the answer goes on from there.
        """
        executor, begun = self.executor, _now_ms()
        fits, choices = _fitting(allowance), list[int]()
        for scores in self._stage_one(sample.question, allowance.share):
            fits = _settle(scores, fits, choices)
        tier, position = list(executor.options.crops)[choices[0]], executor.options.insertion_positions[choices[1]]
        chosen_at = _now_ms()

        prefix = executor.prefix([(sample, tier)], positions=[position])
        looked_at = _now_ms()

        reached = [each for each in executor.options.insertion_positions if each <= position]
        token = prefix.latency_tokens[sample.name, tier][reached.index(position)]
        top_k_scores, block_scores = self._stage_two(token, choices[1], allowance.share)
        fits = _settle(block_scores, fits, choices)
        _settle(top_k_scores, fits, choices)
        choices = [choices[nth] for nth in ORDER]
        top_k, blocks = executor.options.top_ks[choices[2]], executor.options.block_totals[choices[3]]
        stage_two_ms = _now_ms() - looked_at

        request = Request(sample, Knobs(tier, position, top_k, blocks))
        (answer,), _ = executor.answer(
            [request], prefix=prefix, max_new_tokens=self.max_new_tokens, stop_token=self.stop_token
        )
        return Served(answer.tokens, request.knobs, tuple(choices), chosen_at - begun, stage_two_ms)

    def _stage_one(self, question: tuple[int, ...], share: float) -> list[np.ndarray]:
        stage = self.policy.stage_one
        prompt = self.features.embed(torch.tensor(question)).to(self.device)
        seen = gelu(linear(even(prompt), stage.prompt.weight, stage.prompt.bias))
        hidden = gelu(linear(seen, self._join_prompt, self._prepared(share)[0]))
        return _split(linear(hidden, *self._first), stage.tier.options)

    def _stage_two(self, token: Float[Tensor, " width"], position: int, share: float) -> list[np.ndarray]:
        stage = self.policy.stage_two
        mixed = gelu(
            linear(even(token.to(self.device).float()), stage.token.weight, self._prepared(share)[1][position])
        )
        hidden = gelu(linear(mixed, stage.join.weight, stage.join.bias))
        return _split(linear(hidden, *self._second), stage.top_k.options)

    def _prepared(self, share: float) -> tuple[Tensor, Tensor]:
        """What a budget adds to the first stage's second layer, and to the second stage's first at every position."""
        if share not in self._budgets:
            one, two = self.policy.stage_one, self.policy.stage_two
            encoded = self.policy.encoder(torch.tensor([share], device=self.device))
            first = linear(gelu(one.budget(encoded)), self._join_budget, one.join.bias)[0]
            self._budgets[share] = first, two.token.bias + two.position.weight + two.budget(encoded)
        return self._budgets[share]


def _joined(one: Head, other: Head, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two heads as one; a single option scores 0."""
    nothing = torch.zeros(1, width, device=device), torch.zeros(1, device=device)
    parts = [nothing if head.linear is None else (head.linear.weight, head.linear.bias) for head in (one, other)]
    weights, biases = zip(*parts, strict=True)
    return torch.cat(weights), torch.cat(biases)


def _split(scores: Float[Tensor, " options"], first: int) -> list[np.ndarray]:
    found = scores.numpy(force=True)
    return [found[:first], found[first:]]


def _fitting(allowance: Allowance) -> Bool[np.ndarray, "tiers positions blocks top_ks"]:
    """What may be chosen, with axes in the order of decisions. Where nothing fits, the cheapest."""
    promised_ms = allowance.promised_ms.numpy()
    fits = promised_ms <= allowance.limit_ms
    if not fits.any():
        fits.flat[promised_ms.argmin()] = True
    return fits.transpose(ORDER)


def _settle(scores: np.ndarray, fits: np.ndarray, choices: list[int]) -> np.ndarray:
    """Choose the likeliest option that some completion of fits; what is left after it."""
    offered = fits.reshape(len(fits), -1).any(1)
    best = int(np.where(offered, scores, -np.inf).argmax())
    choices.append(best)
    left: np.ndarray = fits[best]
    return left


def _now_ms() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return 1000 * time.perf_counter()
