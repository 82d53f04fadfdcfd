"""A flow model as a workload: a condition is a prompt, a source clip and a camera path, a decision a denoising step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from groupwise.core.placement import RolloutRows
from groupwise.core.types import RewardTerms, Rollouts, Scores, concatenate_rollouts
from groupwise.workloads.base import Workload
from groupwise.workloads.flow.config import FlowConfig
from groupwise.workloads.flow.models.base import GuidedVelocity
from groupwise.workloads.flow.models.trained_parts import enable_gradient_checkpointing
from groupwise.workloads.flow.rewards import clip_rewards, step_rewards, weighted_sum
from groupwise.workloads.flow.sampling.denoiser import Denoiser, first_row_of_each
from groupwise.workloads.flow.sampling.encodings import ConditioningCache
from groupwise.workloads.flow.sampling.steppers import transition_kl, transition_logprob
from groupwise.workloads.flow.task import Condition, FlowTask, check_condition, check_sizes, group_ids


class FlowWorkload(Workload):
    """Trains the steps in the window; everything that members share is computed once."""

    def __init__(self, task: FlowTask, config: FlowConfig, device: torch.device):
        from groupwise.workloads.flow.report import FlowReporter

        self.reporter = FlowReporter(self)
        self.task, self.config, self.device = task, config, device
        self.model = task.model
        self.shape = self.model.asked.latent
        check_sizes(self.model.asked)
        for name, conditions in (("condition", task.conditions), ("held-out condition", task.held_out)):
            for nth, condition in enumerate(conditions):
                check_condition(condition, self.model.asked, condition.name or f"{name} {nth}")
        self.policy = self.model.policy
        self.num_conditions = len(task.conditions)
        self.group_ids = group_ids(task.conditions)
        keep = {"remembered": config.remembered_conditions, "rows_per_pass": config.encode_rows_per_pass}
        if config.gradient_checkpointing:
            enable_gradient_checkpointing(self.policy)
        self.encodings = ConditioningCache(self.model, task.conditions, **keep)
        self.held_out_encodings = ConditioningCache(self.model, task.held_out, **keep)
        self.stage_rows = {"reward": config.encode_rows_per_pass, "evaluation": config.eval_rows_per_pass}

    def rollout(self, rows: RolloutRows) -> Rollouts:
        """Shared steps once per group, then each member's own."""
        denoiser = Denoiser.at(self.config.sampling, rows.step, self.shape, self.device)
        starts = self._starts(denoiser, rows)
        parts, done = [], 0
        for part in rows.passes():
            parts.append(self._members(denoiser, part, starts[done : done + len(part)]))
            done += len(part)
        return concatenate_rollouts(parts)

    def _starts(self, denoiser: Denoiser, rows: RolloutRows) -> Tensor:
        """Each row's latents before the window; members that branch have them in common."""
        if not self.config.sampling.branch:
            return torch.cat([self._before(denoiser, part) for part in rows.passes()])
        first, line = first_row_of_each(rows.group)
        keys = (rows.group[first], rows.member[first], rows.condition[first])
        once = RolloutRows(rows.seed, rows.step, rows.rows_per_pass, *keys)
        return torch.cat([self._before(denoiser, part) for part in once.passes()])[line]

    def _before(self, denoiser: Denoiser, rows: RolloutRows) -> Tensor:
        return denoiser.before(denoiser.first_noise(rows), self._velocity(self.encodings, rows.condition))

    def _members(self, denoiser: Denoiser, rows: RolloutRows, starts: Tensor) -> Rollouts:
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

    def rewards(self, rollouts: Rollouts) -> RewardTerms:
        conditions = self.conditions_of(rollouts)
        terms = clip_rewards(self.task.rewards, conditions, self.decode(rollouts.data["latents"]))
        if not self.task.step_rewards:
            return terms
        expected = [self.decode(latents) for latents in self._expected(rollouts)]
        return step_rewards(self.task.step_rewards, conditions, expected, terms)

    def passes(self, rollouts: Rollouts, rows_per_pass: int) -> Iterable[Tensor]:
        """Siblings together: what they share is computed once a pass."""
        return rollouts.data["group"].argsort(stable=True).split(rows_per_pass)

    def score(self, rollouts: Rollouts) -> Scores:
        data, velocity = rollouts.data, self._velocity(self.encodings, rollouts.data["condition"])
        denoiser = Denoiser(self.config.sampling, self.shape, range(0), self.device)
        logp, kl = [], []
        for nth, steps in enumerate(data["steps"].unbind(1)):
            now, following = data["path"][:, nth].float(), data["path"][:, nth + 1].float()
            alike = denoiser.alike(data["group"], nth)
            transition = denoiser.transition(now, velocity, steps, alike=alike)
            logp.append(transition_logprob(following, transition))
            if self.config.reference:
                with torch.no_grad(), self.model.reference():
                    reference = denoiser.transition(now, velocity, steps, alike=alike)
                kl.append(transition_kl(transition, reference))
        return Scores(torch.stack(logp, dim=1), kl=torch.stack(kl, dim=1) if kl else None)

    def evaluate(self) -> Mapping[str, float]:
        """Held-out clips without any drawn step, from the same noise every time."""
        if not self.task.held_out:
            return {}
        clips = self.generate(torch.arange(len(self.task.held_out)))
        terms = clip_rewards({**self.task.rewards, **self.task.measured}, self.task.held_out, clips)
        metrics = {f"held-out {name}": values.nanmean().item() for name, values in terms.per_rollout.items()}
        rewards = weighted_sum(terms, self.task.weights)
        return {"held-out reward": rewards.nanmean().item(), **metrics} if self.task.weights else metrics

    @torch.no_grad()
    def generate(self, numbers: Tensor) -> Tensor:
        """Clips of held-out conditions under the present policy, `eval_rows_per_pass` at a time."""
        sampling = self.config.sampling
        denoiser = Denoiser(sampling, self.shape, range(sampling.steps, sampling.steps), self.device)
        rows_per_pass = self.stage_rows["evaluation"]
        rows = RolloutRows(self.config.eval_seed, 0, rows_per_pass, numbers, torch.zeros_like(numbers), numbers)
        clips = []
        for part in rows.passes():
            velocity = self._velocity(self.held_out_encodings, part.condition)
            clips.append(self.decode(denoiser.before(denoiser.first_noise(part), velocity)))
        return torch.cat(clips)

    def decode(self, latents: Tensor) -> Tensor:
        return torch.cat([self.model.decode(part) for part in latents.split(self.stage_rows["reward"])])

    def checkpoint_files(self) -> Mapping[str, bytes]:
        return self.task.files

    def conditions_of(self, rollouts: Rollouts) -> list[Condition]:
        return [self.task.conditions[number] for number in rollouts.data["condition"].tolist()]

    def _velocity(self, encodings: ConditioningCache, conditions: Tensor) -> GuidedVelocity:
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
