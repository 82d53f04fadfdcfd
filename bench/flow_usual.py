"""The loop that flow models are usually trained with, transcribed plainly, for comparison; see bench/flow.py.

Every step is drawn, kept (latents and next latents) and trained, members start from noise of their own, conditions are
encoded for every batch anew, and rewards are normalized among rollouts of one prompt, or of one condition if so asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.core.placement import RolloutRows, place
from groupwise.training.config import Config
from groupwise.training.run import Setup
from groupwise.workloads.flow.models.base import GuidedVelocity
from groupwise.workloads.flow.rewards import clip_rewards, weighted_sum
from groupwise.workloads.flow.sampling.schedule import noise_levels
from groupwise.workloads.flow.sampling.steppers import (
    STEPPERS,
    NoiseInterval,
    ode,
    sample_transition,
    transition_logprob,
)
from groupwise.workloads.flow.workload import FlowWorkload


@dataclass
class Batch:
    condition: Tensor
    latents: Tensor
    next_latents: Tensor
    logp: Tensor
    last: Tensor


class UsualLoop:
    """Same model, conditions, rewards, noise scale, clip and learning rate as the config's; the rest as usual."""

    def __init__(self, setup: Setup, *, by_prompt: bool = True):
        assert isinstance(setup.workload, FlowWorkload)
        self.setup, self.workload = setup, setup.workload
        self.config: Config = setup.config
        self.sampling = setup.workload.config.sampling
        self.levels = torch.tensor(noise_levels(self.sampling))
        self.by_prompt, self.stored_bytes = by_prompt, 0

    def epoch(self, step: int) -> float:
        """Sample, judge and train once; the mean reward."""
        rows = place(self.setup.shape, seed=self.config.seed, step=step).rows_of(0)
        with torch.no_grad():
            batches = [self._sample(part) for part in rows.passes()]
        self.stored_bytes = sum(
            tensor.nbytes for batch in batches for tensor in (batch.latents, batch.next_latents, batch.last)
        )
        conditions = [self.workload.task.conditions[number] for number in rows.condition.tolist()]
        clips = self.workload.decode(torch.cat([batch.last for batch in batches]))
        rewards = weighted_sum(clip_rewards(self.workload.task.rewards, conditions, clips), self.workload.task.weights)
        keys = [condition.prompt if self.by_prompt else condition.name for condition in conditions]
        advantages = _normalized(rewards, keys)
        self._train(batches, advantages.float())
        return rewards.mean().item()

    def _velocity(self, condition: Tensor, latents: Tensor, sigma: Tensor) -> Tensor:
        encoded = self.workload.model.encode([self.workload.task.conditions[number] for number in condition.tolist()])
        encoding = {name: torch.stack([each[name] for each in encoded]) for name in encoded[0]}
        return GuidedVelocity(self.workload.model, encoding, self.sampling.guidance)(latents, sigma)

    def _step(self, condition: Tensor, latents: Tensor, nth: int, *, noisy: bool = True):  # type: ignore[no-untyped-def]
        sigma, following = (self.levels[at].expand(len(latents)) for at in (nth, nth + 1))
        velocity = self._velocity(condition, latents, sigma)
        span = NoiseInterval(sigma, following, self.sampling.eta, float(self.levels[1]))
        return (STEPPERS[self.sampling.stepper] if noisy else ode)(latents, velocity, span)

    def _sample(self, rows: RolloutRows) -> Batch:
        shape = (len(rows), *self.workload.shape)
        elements = torch.Size(self.workload.shape).numel()
        path, logp = [rows.normal(0, elements).float().view(shape)], []
        for nth in range(self.sampling.steps - 1):
            transition = self._step(rows.condition, path[-1], nth)
            path.append(sample_transition(transition, rows.normal(nth + 1, elements).float().view(shape)))
            logp.append(transition_logprob(path[-1], transition))
        last = self._step(rows.condition, path[-1], self.sampling.steps - 1, noisy=False).mean
        return Batch(rows.condition, torch.stack(path[:-1], 1), torch.stack(path[1:], 1), torch.stack(logp, 1), last)

    def _train(self, batches: list[Batch], advantages: Tensor) -> None:
        state, clip = self.setup.state, self.config.loss
        trained = self.sampling.steps - 1
        state.optimizer.zero_grad(set_to_none=True)
        for batch, gain in zip(batches, advantages.split([len(batch.condition) for batch in batches]), strict=True):
            for nth in range(trained):
                transition = self._step(batch.condition, batch.latents[:, nth], nth)
                ratio = (transition_logprob(batch.next_latents[:, nth], transition) - batch.logp[:, nth]).exp()
                kept = torch.minimum(ratio * gain, ratio.clamp(1 - clip.clip_low, 1 + clip.clip_high) * gain)
                (-kept.sum() / (len(advantages) * trained)).backward()
        torch.nn.utils.clip_grad_norm_(state.trainable, self.config.optimizer.max_grad_norm or float("inf"))
        state.optimizer.step()


def _normalized(rewards: Tensor, keys: list[str]) -> Tensor:
    """Among rollouts whose key is the same."""
    advantages = torch.zeros_like(rewards)
    for key in set(keys):
        same = torch.tensor([each == key for each in keys])
        advantages[same] = (rewards[same] - rewards[same].mean()) / (rewards[same].std(correction=0) + 1e-6)
    return advantages.clamp(-5, 5)
