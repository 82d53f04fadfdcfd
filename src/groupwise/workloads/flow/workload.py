"""FlowWorkload: a condition is a prompt, a source clip and a camera path; a decision is a denoising step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from groupwise.core.placement import RolloutRows
from groupwise.core.transfer import send
from groupwise.core.types import RewardTerms, Rollouts, Scores, concatenate_rollouts, concatenate_scores
from groupwise.workloads.base import Workload
from groupwise.workloads.flow.config import FlowConfig
from groupwise.workloads.flow.evaluate import evaluate_clips
from groupwise.workloads.flow.models.base import GuidedVelocity
from groupwise.workloads.flow.models.trained_parts import enable_gradient_checkpointing
from groupwise.workloads.flow.report import FlowReporter
from groupwise.workloads.flow.reward_requests import RewardRequests
from groupwise.workloads.flow.rewards import clip_rewards, step_rewards
from groupwise.workloads.flow.sampling.denoiser import Denoiser, first_row_of_each
from groupwise.workloads.flow.sampling.encodings import ConditioningCache
from groupwise.workloads.flow.sampling.schedule import noise_levels, trained_steps
from groupwise.workloads.flow.sampling.steppers import transition_kl, transition_logprob
from groupwise.workloads.flow.task import Condition, FlowTask, check_condition, check_latent_shape, group_ids


class FlowWorkload(Workload):
    """Trains the steps in the window; what members of a group share is computed once."""

    def __init__(self, task: FlowTask, config: FlowConfig, device: torch.device):
        self.reporter = FlowReporter(self)
        self.task, self.config, self.device = task, config, device
        self.model = task.model
        self.latent_shape = self.model.condition_spec.latent_shape
        self._check_conditions()
        self.policy = self.model.policy
        self._denoiser = self.denoiser(config.sampling.num_inference_steps)
        self.num_conditions, self.num_held_out = len(task.conditions), len(task.held_out)
        self.group_ids = group_ids(task.conditions)
        limits = {"max_cached": config.cached_conditions, "encode_rows": config.encode_rows}
        if config.gradient_checkpointing:
            enable_gradient_checkpointing(self.policy)
        self.conditioning = ConditioningCache(self.model, task.conditions, **limits)
        self.held_out_conditioning = ConditioningCache(self.model, task.held_out, **limits)
        self._requests = RewardRequests(task.rewards)
        self.row_limits = {"encode_rows": config.encode_rows, "eval_rows": config.eval_rows}

    def _check_conditions(self) -> None:
        check_latent_shape(self.model.condition_spec)
        for kind, conditions in (("condition", self.task.conditions), ("held-out condition", self.task.held_out)):
            for index, condition in enumerate(conditions):
                check_condition(condition, self.model.condition_spec, condition.name or f"{kind} {index}")

    def rollout(self, rows: RolloutRows) -> Rollouts:
        """Shared steps once per group, then the steps of each member. Services are asked about a pass meanwhile."""
        self._requests.forget()
        denoiser = self._denoiser.at_step(rows.step)
        starts = self._window_starts(denoiser, rows)
        parts, done = [], 0
        for part in rows.passes():
            parts.append(self._sample_members(denoiser, part, starts[done : done + len(part)]))
            done += len(part)
        return concatenate_rollouts(parts)

    def _window_starts(self, denoiser: Denoiser, rows: RolloutRows) -> Tensor:
        """Each row's latents before the window: one computation per group where members share their noise."""
        if not self.config.sampling.shared_noise:
            return torch.cat([self._window_start(denoiser, part) for part in rows.passes()])
        first, index = first_row_of_each(rows.group)
        keys = (rows.group[first], rows.member[first], rows.condition[first])
        once = RolloutRows(rows.seed, rows.step, rows.rows_per_pass, *keys)
        starts = torch.cat([self._window_start(denoiser, part) for part in once.passes()])
        return starts[send(index, starts.device)]

    def _window_start(self, denoiser: Denoiser, rows: RolloutRows) -> Tensor:
        velocity = self.velocity(self.conditioning, rows.condition)
        return denoiser.denoise_to_window(denoiser.initial_noise(rows), velocity)

    def _sample_members(self, denoiser: Denoiser, rows: RolloutRows, starts: Tensor) -> Rollouts:
        velocity = self.velocity(self.conditioning, rows.condition)
        window = denoiser.sample_window(starts, rows, velocity)
        latents = denoiser.denoise_from_window(window.latents[:, -1].float(), velocity)
        requests = {}
        if self._requests.services:
            conditions = [self.task.conditions[index] for index in rows.condition.tolist()]
            requests["reward_request"] = self._requests.submit(conditions, self.decode(latents))
        return Rollouts(
            self.group_ids[rows.condition],
            window.logp,
            torch.ones_like(window.logp, dtype=torch.bool),
            {
                "condition": rows.condition,
                "group": rows.group,
                "steps": torch.tensor([denoiser.window]).expand(len(rows), -1),
                "window_latents": window.latents,
                "latents": latents,
                **requests,
            },
        )

    def rewards(self, rollouts: Rollouts) -> RewardTerms:
        conditions = self.conditions_of(rollouts)
        request: Tensor | None = rollouts.data.get("reward_request")
        if request is not None and not self._requests.holds(request):
            request = None  # rewarded before
        terms = self._rewards_of_clips(rollouts) if request is None else self._requested_rewards(conditions, request)
        if self.task.step_rewards:
            predicted = [self.decode(latents) for latents in self._predict_clean(rollouts)]
            terms = step_rewards(self.task.step_rewards, conditions, predicted, terms)
        if request is not None:
            self._requests.release(request)
        return terms

    def _rewards_of_clips(self, rollouts: Rollouts) -> RewardTerms:
        return clip_rewards(self.task.rewards, self.conditions_of(rollouts), self.decode(rollouts.data["latents"]))

    def _requested_rewards(self, conditions: Sequence[Condition], request: Tensor) -> RewardTerms:
        """The answers of services that were asked during the rollout, and what functions here say to the same clips."""
        here = {name: each for name, each in self.task.rewards.items() if name not in self._requests.services}
        own = clip_rewards(here, conditions, self._requests.clips(request)) if here else RewardTerms({})
        answers = self._requests.collect(request)
        columns = {**own.per_rollout, **answers.per_rollout}
        failures = {**own.failures, **answers.failures}
        return RewardTerms({name: columns[name] for name in self.task.rewards}, failures)

    @torch.no_grad()
    def _predict_clean(self, rollouts: Rollouts) -> list[Tensor]:
        """The clean latents predicted after each sampled step, under the policy that sampled it."""
        denoiser = self._denoiser
        parts = []
        for rows in torch.arange(len(rollouts)).split(self.row_limits["encode_rows"]):
            data = rollouts.select(rows).data
            velocity = self.velocity(self.conditioning, data["condition"])
            following = data["window_latents"].unbind(1)[1:]
            parts.append(
                [
                    denoiser.predict_clean(latents.float(), velocity, steps + 1)
                    for latents, steps in zip(following, data["steps"].unbind(1), strict=True)
                ]
            )
        return [torch.cat(columns) for columns in zip(*parts, strict=True)]

    def passes(self, rollouts: Rollouts, rows_per_pass: int) -> Iterable[Tensor]:
        """Members of a group together: what they share is computed once per pass."""
        return rollouts.data["group"].argsort(stable=True).split(rows_per_pass)

    def score(self, rollouts: Rollouts) -> Scores:
        return concatenate_scores([score() for score in self.score_parts(rollouts)])

    def score_parts(self, rollouts: Rollouts) -> Sequence[Callable[[], Scores]]:
        """One denoising step each."""
        velocity = self.velocity(self.conditioning, rollouts.data["condition"])
        return [partial(self._score_step, rollouts, velocity, index) for index in range(rollouts.logp.shape[1])]

    def _score_step(self, rollouts: Rollouts, velocity: GuidedVelocity, index: int) -> Scores:
        """Step `index` of the window."""
        data, denoiser = rollouts.data, self._denoiser
        current, following = (data["window_latents"][:, at].float() for at in (index, index + 1))
        steps, shared = data["steps"][:, index], denoiser.shared_start(data["group"], index)
        transition = denoiser.transition(current, velocity, steps, shared=shared)
        logp = transition_logprob(following, transition)[:, None]
        if not self.config.reference:
            return Scores(logp)
        with torch.no_grad(), self.model.reference():
            reference = denoiser.transition(current, velocity, steps, shared=shared)
        return Scores(logp, kl=transition_kl(transition, reference)[:, None])

    @property
    def levels(self) -> Sequence[float]:
        """Noise levels of a rollout, one more than there are steps."""
        return self._denoiser.levels

    def denoiser(self, steps: int) -> Denoiser:
        """So many steps at the noise levels of the config or of the model; without a window."""
        sampling = self.config.sampling
        own = self.model.noise_levels(steps) if sampling.shift is None else None
        return Denoiser(sampling, own or noise_levels(sampling, steps), self.latent_shape, self.device)

    def idle_parts(self, rollouts: Rollouts) -> Sequence[str]:
        steps = rollouts.data["steps"].unique().tolist()
        return self.model.idle_parts([self.levels[step] for step in steps])

    def never_trained(self) -> Sequence[str]:
        """Children of the policy that no training step uses."""
        return self.model.idle_parts([self.levels[step] for step in trained_steps(self.config.sampling)])

    def velocity(self, conditioning: ConditioningCache, conditions: Tensor) -> GuidedVelocity:
        """The policy's velocity for these conditions, one row for each."""
        return GuidedVelocity(self.model, conditioning.of(conditions, self.device), self.config.sampling.guidance_scale)

    def decode(self, latents: Tensor) -> Tensor:
        return torch.cat([self.model.decode(part) for part in latents.split(self.row_limits["encode_rows"])])

    def evaluate(self, rows: Tensor) -> Mapping[str, Tensor]:
        return evaluate_clips(self, rows)

    def checkpoint_files(self) -> Mapping[str, bytes]:
        return self.task.checkpoint_files

    def conditions_of(self, rollouts: Rollouts) -> list[Condition]:
        return [self.task.conditions[index] for index in rollouts.data["condition"].tolist()]
