"""The loops that flow models are usually trained with, for comparison in bench/flow.py.

Each step of the window is sampled, stored (latents and next latents) and trained, the others are deterministic; members
start from different noise. The usual loop has all steps but the last in its window, encodes conditions again for each
pass through the model, and normalizes rewards among rollouts of one prompt. The plain loop has the recipe's window,
encodes once for each batch, and normalizes among rollouts of one condition.
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
from groupwise.workloads.flow.sampling.schedule import noise_levels, window_at
from groupwise.workloads.flow.sampling.steppers import (
    STEPPERS,
    NoiseInterval,
    Transition,
    ode,
    sample_transition,
    transition_logprob,
)
from groupwise.workloads.flow.workload import FlowWorkload


@dataclass
class StoredBatch:
    condition: Tensor
    latents: Tensor
    next_latents: Tensor
    logp: Tensor
    last: Tensor


class UsualLoop:
    """Model, conditions, rewards, noise scale, clip range and learning rate are the config's."""

    def __init__(self, setup: Setup, *, by_prompt: bool = True, encode_again: bool = True):
        assert isinstance(setup.workload, FlowWorkload)
        self.setup, self.workload = setup, setup.workload
        self.config: Config = setup.config
        self.sampling = setup.workload.config.sampling
        self.levels = torch.tensor(noise_levels(self.sampling))
        self.by_prompt, self.encode_again = by_prompt, encode_again
        self.window = range(0)

    def epoch(self, step: int) -> float:
        """Sample, reward and train once; returns the mean reward."""
        rows = place(self.setup.shape, seed=self.config.seed, step=step).rows_of(0)
        self.window = window_at(self.sampling, step)
        with torch.no_grad():
            batches = [self._sample(part) for part in rows.passes()]
        conditions = [self.workload.task.conditions[index] for index in rows.condition.tolist()]
        clips = self.workload.decode(torch.cat([batch.last for batch in batches]))
        rewards = weighted_sum(clip_rewards(self.workload.task.rewards, conditions, clips), self.workload.task.weights)
        keys = [condition.prompt for condition in conditions] if self.by_prompt else rows.condition.tolist()
        advantages = _normalize(rewards, keys)
        self._train(batches, advantages.float())
        return rewards.mean().item()

    def _velocity(self, condition: Tensor, latents: Tensor, sigma: Tensor) -> Tensor:
        if not self.encode_again:
            return self.workload.velocity(self.workload.conditioning, condition)(latents, sigma)
        encoded = self.workload.model.encode([self.workload.task.conditions[index] for index in condition.tolist()])
        conditioning = {name: torch.stack([row[name] for row in encoded]) for name in encoded[0]}
        return GuidedVelocity(self.workload.model, conditioning, self.sampling.guidance_scale)(latents, sigma)

    def _step(self, condition: Tensor, latents: Tensor, step: int, *, noisy: bool = True) -> Transition:
        sigma, sigma_next = (self.levels[index].expand(len(latents)) for index in (step, step + 1))
        velocity = self._velocity(condition, latents, sigma)
        interval = NoiseInterval(sigma, sigma_next, self.sampling.eta, float(self.levels[1]))
        return (STEPPERS[self.sampling.stepper] if noisy else ode)(latents, velocity, interval)

    def _sample(self, rows: RolloutRows) -> StoredBatch:
        shape = (len(rows), *self.workload.latent_shape)
        elements, last_step = torch.Size(shape[1:]).numel(), self.sampling.num_inference_steps - 1
        latents, logp = [rows.normal(0, elements).float().view(shape)], []
        for step in range(self.window.start):
            latents = [self._step(rows.condition, latents[-1], step, noisy=False).mean]
        for step in self.window:
            transition = self._step(rows.condition, latents[-1], step)
            latents.append(sample_transition(transition, rows.normal(step + 1, elements).float().view(shape)))
            logp.append(transition_logprob(latents[-1], transition))
        last = latents[-1]
        for step in range(self.window.stop, last_step + 1):
            last = self._step(rows.condition, last, step, noisy=False).mean
        before, after = torch.stack(latents[:-1], 1), torch.stack(latents[1:], 1)
        return StoredBatch(rows.condition, before, after, torch.stack(logp, 1), last)

    def _train(self, batches: list[StoredBatch], advantages: Tensor) -> None:
        state, loss = self.setup.state, self.config.loss
        state.optimizer.zero_grad(set_to_none=True)
        for batch, advantage in zip(
            batches, advantages.split([len(batch.condition) for batch in batches]), strict=True
        ):
            for index, step in enumerate(self.window):
                transition = self._step(batch.condition, batch.latents[:, index], step)
                ratio = (transition_logprob(batch.next_latents[:, index], transition) - batch.logp[:, index]).exp()
                clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
                surrogate = torch.minimum(ratio * advantage, clipped * advantage)
                (-surrogate.sum() / (len(advantages) * len(self.window))).backward()
        torch.nn.utils.clip_grad_norm_(state.trainable, self.config.optimizer.max_grad_norm or float("inf"))
        state.optimizer.step()


def _normalize(rewards: Tensor, keys: list[str] | list[int]) -> Tensor:
    """Among rollouts with the same key."""
    advantages = torch.zeros_like(rewards)
    for key in set(keys):
        same = torch.tensor([other == key for other in keys])
        advantages[same] = (rewards[same] - rewards[same].mean()) / (rewards[same].std(correction=0) + 1e-6)
    return advantages.clamp(-5, 5)
