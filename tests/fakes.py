"""A workload small enough to reason about, with everything that real ones have: ragged rows, a reference, entropy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import groupwise as gw

CHOICES, DECISIONS, CONDITIONS = 4, 3, 40


class TinyPolicy(nn.Module):
    """Logits from the condition and the place in the row. The head is apart, so that a forgotten one shows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.body = nn.Embedding(CONDITIONS, 6)
        self.head = nn.Linear(6, DECISIONS * CHOICES)

    def forward(self, conditions: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(conditions))
        return self.head(hidden).view(-1, DECISIONS, CHOICES).log_softmax(-1)


class TinyWorkload(gw.Workload):
    """Rows of one to three choices; the reward is the share of choices equal to the condition's number mod 4."""

    def __init__(self, config: TinyConfig, device: torch.device):
        self.config = config
        self.policy = TinyPolicy().to(device, getattr(torch, config.dtype))
        self.reference = TinyPolicy().to(device, getattr(torch, config.dtype))
        with torch.no_grad():
            self.reference.head.bias.add_(torch.linspace(-1, 1, DECISIONS * CHOICES).to(self.reference.head.bias))
        self.num_conditions = self.num_held_out = CONDITIONS

    def rollout(self, rows: gw.RolloutRows) -> gw.Rollouts:
        logp = self.policy(rows.condition)
        uniforms = torch.cat([rows.uniform(decision) for decision in range(DECISIONS)], dim=1).to(logp)
        choices = (logp.exp().cumsum(-1) < uniforms[:, :, None]).sum(-1).clamp(max=CHOICES - 1)
        lengths = 1 + (rows.condition + rows.member) % DECISIONS
        return gw.Rollouts(
            group_ids=torch.tensor([gw.group_id(int(condition)) for condition in rows.condition]),
            logp=logp.gather(2, choices[:, :, None])[:, :, 0],
            mask=torch.arange(DECISIONS)[None] < lengths[:, None],
            data={"condition": rows.condition, "choices": choices, "member": rows.member},
        )

    def expected_costs(self, conditions: Tensor) -> Tensor:
        return (1 + conditions % DECISIONS).double()

    def rewards(self, rollouts: gw.Rollouts) -> gw.RewardTerms:
        time.sleep(self.config.seconds_per_step)
        right = rollouts.data["choices"] == rollouts.data["condition"][:, None] % CHOICES
        share = (right & rollouts.mask).sum(1) / rollouts.mask.sum(1)
        if self.config.flat_below:
            share = share.masked_fill(rollouts.data["condition"] < self.config.flat_below, 0.5)
        if self.config.missing_member is not None:
            share = share.masked_fill(rollouts.data["member"] == self.config.missing_member, math.nan)
        return gw.RewardTerms({"share": share.double()})

    def score(self, rollouts: gw.Rollouts) -> gw.Scores:
        def taken(logp: Tensor) -> Tensor:
            return logp.gather(2, rollouts.data["choices"][:, :, None])[:, :, 0]

        logp = self.policy(rollouts.data["condition"])
        with torch.no_grad():
            reference = taken(self.reference(rollouts.data["condition"]))
        return gw.Scores(taken(logp), entropy=-(logp.exp() * logp).sum(-1), reference_logp=reference)

    def score_parts(self, rollouts: gw.Rollouts) -> Sequence[Callable[[], gw.Scores]]:
        if not self.config.score_by_decision:
            return super().score_parts(rollouts)
        return [partial(self._score_decision, rollouts, index) for index in range(DECISIONS)]

    def _score_decision(self, rollouts: gw.Rollouts, index: int) -> gw.Scores:
        scored = self.score(rollouts).by_name()
        return gw.Scores(**{name: column[:, index : index + 1] for name, column in scored.items()})

    def evaluate(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        self.evaluated = rows.tolist()
        return {"right": (self.policy(rows).argmax(-1) == (rows % CHOICES)[:, None]).double().mean(-1)}


@dataclass(frozen=True)
class TinyConfig(gw.WorkloadConfig):
    dtype: str = "float64"
    """Of the policy."""
    seconds_per_step: float = 0.0
    """How long the reward takes."""
    missing_member: int | None = None
    """The member of each group whose reward fails."""
    flat_below: int = 0
    """Conditions below this number give every member the same reward."""

    score_by_decision: bool = False
    """Score each decision apart, with a graph of its own."""

    def build(self, device: torch.device) -> TinyWorkload:
        return TinyWorkload(self, device)


def recipe() -> gw.Config:
    return gw.Config(
        TinyConfig(),
        steps=6,
        conditions_per_step=8,
        group_size=4,
        rows_per_pass=4,
        loss=gw.LossConfig(kl=0.05, entropy=0.01),
        optimizer=gw.OptimizerConfig(learning_rate=0.05, ema_decay=0.9, schedule="cosine", updates_per_step=2),
        run=gw.RunConfig(checkpoint_every=2),
    )


def slow_recipe() -> gw.Config:
    """Slow enough to be killed in the middle of any stage."""
    from dataclasses import replace

    config = recipe()
    return replace(
        config,
        workload=TinyConfig(seconds_per_step=0.1),
        steps=14,
        run=replace(config.run, checkpoint_every=1),
    )


Change = Callable[[gw.Config], gw.Config]
