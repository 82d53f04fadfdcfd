"""The tiny workload with a number that is not finite in one step, on one rank if told so."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass, replace

import fakes
import torch
from torch import Tensor

import groupwise as gw

MEMBER = 1
"""The member of each group that the fault strikes, among conditions below LAST_CONDITION."""
LAST_CONDITION = 12


class FaultyWorkload(fakes.TinyWorkload):
    """Counts its rollouts: with one round a step and no preflight that is the number of the step."""

    def __init__(self, config: FaultyConfig, device: torch.device):
        super().__init__(config, device)
        self.fault, self.rolled_out = config, -1

    def strikes(self, fault: str, rollouts: gw.Rollouts) -> Tensor:
        """The rows of a step that are struck."""
        here = self.fault.rank in (None, int(os.environ.get("RANK", "0")))
        due = self.fault.first_step <= self.rolled_out <= self.fault.last_step and fault == self.fault.fault
        rows = (rollouts.data["member"] == MEMBER) & (rollouts.data["condition"] < LAST_CONDITION)
        return rows & torch.tensor(here and due)

    def rollout(self, rows: gw.RolloutRows) -> gw.Rollouts:
        self.rolled_out += 1
        rollouts = super().rollout(rows)
        struck = self.strikes("rollout logp", rollouts)[:, None]
        return replace(rollouts, logp=rollouts.logp.masked_fill(struck, -torch.inf))

    def rewards(self, rollouts: gw.Rollouts) -> gw.RewardTerms:
        share = super().rewards(rollouts).per_rollout["share"]
        for fault, value in (("reward nan", torch.nan), ("reward inf", torch.inf)):
            struck = self.strikes(fault, rollouts)
            share = torch.full_like(share, value) if struck.any() else share
        return gw.RewardTerms({"share": share})

    def score(self, rollouts: gw.Rollouts) -> gw.Scores:
        scores = super().score(rollouts)
        logp, reference = scores.logp, scores.reference_logp
        assert reference is not None
        logp = logp.masked_fill(self.strikes("logp", rollouts)[:, None], torch.nan)
        reference = reference.masked_fill(self.strikes("reference", rollouts)[:, None], -torch.inf)
        struck = self.strikes("gradient", rollouts)
        if struck.any():  # the value is unchanged, its derivative at 0 is not
            logp = logp + struck[:, None] * (logp - logp.detach()).abs().sqrt()
        return replace(scores, logp=logp, reference_logp=reference)

    def evaluate(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Also says which weights this rank has."""
        weights = torch.cat([weight.detach().flatten() for weight in self.policy.parameters()])
        digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
        sys.stderr.write(f"weights after {self.rolled_out + 1} rollouts: {digest}\n")
        return super().evaluate(rows)


@dataclass(frozen=True)
class FaultyConfig(fakes.TinyConfig):
    fault: str = ""
    first_step: int = 2
    last_step: int = 2
    rank: int | None = None

    def build(self, device: torch.device) -> FaultyWorkload:
        return FaultyWorkload(self, device)


def recipe() -> gw.Config:
    config = fakes.recipe()
    return replace(config, workload=FaultyConfig(), run=replace(config.run, preflight=False, checkpoint_every=100))
