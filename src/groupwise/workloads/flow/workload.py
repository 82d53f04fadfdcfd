"""A flow model as a workload: a condition is a prompt, a source clip and a camera path, a decision a denoising step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.core.placement import Rows
from groupwise.core.types import Rollouts, Scored, Terms, concatenate
from groupwise.workloads.base import Workload
from groupwise.workloads.flow.config import FlowConfig
from groupwise.workloads.flow.models.base import GuidedVelocity
from groupwise.workloads.flow.models.trained_parts import keep_block_inputs_only
from groupwise.workloads.flow.rewards import judge_clips, judge_steps, weighed
from groupwise.workloads.flow.sampling.denoiser import Denoiser, first_of_each
from groupwise.workloads.flow.sampling.encodings import Encodings
from groupwise.workloads.flow.sampling.steppers import divergence, log_probability
from groupwise.workloads.flow.task import Condition, FlowTask, check_condition, check_sizes, ids_of


class FlowWorkload(Workload):
    """Trains the steps in the window; everything that members share is computed once."""

    def __init__(self, task: FlowTask, config: FlowConfig, device: torch.device):
        self.task, self.config, self.device = task, config, device
        self.model = task.model
        self.shape = self.model.asked.latent
        check_sizes(self.model.asked)
        for name, conditions in (("condition", task.conditions), ("held-out condition", task.held_out)):
            for nth, condition in enumerate(conditions):
                check_condition(condition, self.model.asked, condition.name or f"{name} {nth}")
        self.policy = self.model.policy
        self.conditions = len(task.conditions)
        self.group_ids = ids_of(task.conditions)
        keep = {"remembered": config.remembered_conditions, "rows_per_pass": config.encode_rows_per_pass}
        if config.gradient_checkpointing:
            keep_block_inputs_only(self.policy)
        self.encodings = Encodings(self.model, task.conditions, **keep)
        self.held_out_encodings = Encodings(self.model, task.held_out, **keep)
        self.stage_rows = {"reward": config.encode_rows_per_pass, "evaluation": config.eval_rows_per_pass}

    def rollout(self, rows: Rows) -> Rollouts:
        """Shared steps once per group, then each member's own."""
        denoiser = Denoiser.at(self.config.sampling, rows.step, self.shape, self.device)
        starts = self._starts(denoiser, rows)
        parts, done = [], 0
        for part in rows.passes():
            parts.append(self._members(denoiser, part, starts[done : done + len(part)]))
            done += len(part)
        return concatenate(parts)

    def _starts(self, denoiser: Denoiser, rows: Rows) -> Tensor:
        """Each row's latents before the window; members that branch have them in common."""
        if not self.config.sampling.branch:
            return torch.cat([self._before(denoiser, part) for part in rows.passes()])
        first, line = first_of_each(rows.group)
        keys = (rows.group[first], rows.member[first], rows.condition[first])
        once = Rows(rows.seed, rows.step, rows.rows_per_pass, *keys)
        return torch.cat([self._before(denoiser, part) for part in once.passes()])[line]

    def _before(self, denoiser: Denoiser, rows: Rows) -> Tensor:
        return denoiser.before(denoiser.first_noise(rows), self._velocity(self.encodings, rows.condition))

    def _members(self, denoiser: Denoiser, rows: Rows, starts: Tensor) -> Rollouts:
        velocity = self._velocity(self.encodings, rows.condition)
        drawn = denoiser.within(starts, rows, velocity)
        latents = denoiser.after(drawn.path[:, -1].float(), velocity)
        steps = torch.tensor([denoiser.window]).expand(len(rows), -1)
        return Rollouts(
            self.group_ids[rows.condition],
            drawn.logp,
            torch.ones_like(drawn.logp, dtype=torch.bool),
            {
                "condition": rows.condition,
                "group": rows.group,
                "steps": steps,
                "path": drawn.path,
                "latents": latents,
            },
        )

    def rewards(self, rollouts: Rollouts) -> Terms:
        conditions = self._conditions_of(rollouts)
        terms = judge_clips(self.task.rewards, conditions, self.decode(rollouts.data["latents"]))
        if not self.task.step_rewards:
            return terms
        expected = [self.decode(latents) for latents in self._expected(rollouts)]
        return judge_steps(self.task.step_rewards, conditions, expected, terms)

    def passes(self, rollouts: Rollouts, rows_per_pass: int) -> Iterable[Tensor]:
        """Siblings together: what they share is computed once a pass."""
        return rollouts.data["group"].argsort(stable=True).split(rows_per_pass)

    def score(self, rollouts: Rollouts) -> Scored:
        data, velocity = rollouts.data, self._velocity(self.encodings, rollouts.data["condition"])
        denoiser = Denoiser(self.config.sampling, self.shape, range(0), self.device)
        logp, kl = [], []
        for nth, steps in enumerate(data["steps"].unbind(1)):
            now, following = data["path"][:, nth].float(), data["path"][:, nth + 1].float()
            alike = denoiser.alike(data["group"], nth)
            transition = denoiser.transition(now, velocity, steps, alike=alike)
            logp.append(log_probability(following, transition))
            if self.config.reference:
                with torch.no_grad(), self.model.reference():
                    reference = denoiser.transition(now, velocity, steps, alike=alike)
                kl.append(divergence(transition, reference))
        return Scored(torch.stack(logp, dim=1), kl=torch.stack(kl, dim=1) if kl else None)

    def evaluate(self) -> Mapping[str, float]:
        """Held-out clips without any drawn step, from the same noise every time."""
        if not self.task.held_out:
            return {}
        clips = self.generate(torch.arange(len(self.task.held_out)))
        terms = judge_clips({**self.task.rewards, **self.task.measured}, self.task.held_out, clips)
        figures = {f"held-out {name}": values.nanmean().item() for name, values in terms.values.items()}
        rewards = weighed(terms, self.task.weights)
        return {"held-out reward": rewards.nanmean().item(), **figures} if self.task.weights else figures

    def pictures(self) -> Mapping[str, Callable[[Path], None]]:
        """The first held-out clips."""
        numbers = torch.arange(min(self.task.pictured, len(self.task.held_out)))
        if not self.task.pictures or not len(numbers):
            return {}
        shown, clips = [self.task.held_out[number] for number in numbers], self.generate(numbers)
        return {name: draw(shown, clips) for name, draw in self.task.pictures.items()}

    @torch.no_grad()
    def generate(self, numbers: Tensor) -> Tensor:
        """Clips of held-out conditions under the present policy, `eval_rows_per_pass` at a time."""
        sampling = self.config.sampling
        denoiser = Denoiser(sampling, self.shape, range(sampling.steps, sampling.steps), self.device)
        rows_per_pass = self.stage_rows["evaluation"]
        rows = Rows(self.config.eval_seed, 0, rows_per_pass, numbers, torch.zeros_like(numbers), numbers)
        clips = []
        for part in rows.passes():
            velocity = self._velocity(self.held_out_encodings, part.condition)
            clips.append(self.decode(denoiser.before(denoiser.first_noise(part), velocity)))
        return torch.cat(clips)

    def decode(self, latents: Tensor) -> Tensor:
        return torch.cat([self.model.decode(part) for part in latents.split(self.stage_rows["reward"])])

    def describe(self, rollouts: Rollouts) -> Sequence[Mapping[str, Any]]:
        return [
            {"prompt": condition.prompt, "name": condition.name, "trained_steps": steps}
            for condition, steps in zip(self._conditions_of(rollouts), rollouts.data["steps"].tolist(), strict=True)
        ]

    def notes(self) -> Sequence[str]:
        trained = sum(weight.numel() for weight in self.policy.parameters() if weight.requires_grad)
        every = sum(weight.numel() for weight in self.policy.parameters())
        return [f"{trained:,} of the transformer's {every:,} numbers are trained", *self.task.notes]

    def files(self) -> Mapping[str, bytes]:
        return self.task.files

    def _conditions_of(self, rollouts: Rollouts) -> list[Condition]:
        return [self.task.conditions[number] for number in rollouts.data["condition"].tolist()]

    def _velocity(self, encodings: Encodings, conditions: Tensor) -> GuidedVelocity:
        """The policy's velocity of these rows, their encodings looked up once."""
        return GuidedVelocity(self.model, encodings.of(conditions, self.device), self.config.sampling.guidance)

    @torch.no_grad()
    def _expected(self, rollouts: Rollouts) -> list[Tensor]:
        """What the clip is expected to be after each drawn step, under the policy that drew it."""
        denoiser = Denoiser(self.config.sampling, self.shape, range(0), self.device)
        parts = [
            self._expected_of(denoiser, rollouts.select(rows))
            for rows in torch.arange(len(rollouts)).split(self.stage_rows["reward"])
        ]
        return [torch.cat(columns) for columns in zip(*parts, strict=True)]

    def _expected_of(self, denoiser: Denoiser, rollouts: Rollouts) -> list[Tensor]:
        velocity, path = self._velocity(self.encodings, rollouts.data["condition"]), rollouts.data["path"]
        return [
            denoiser.expected(path[:, nth + 1].float(), velocity, step + 1)
            for nth, step in enumerate(rollouts.data["steps"].unbind(1))
        ]
