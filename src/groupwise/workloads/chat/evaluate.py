"""Evaluation on held-out prompts: sample completions, grade them by their rewards, estimate pass@k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb, sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool
from torch import Tensor

from groupwise.core.errors import require
from groupwise.core.placement import RolloutRows
from groupwise.core.randomness import random_bits
from groupwise.workloads.chat.data import PromptSet
from groupwise.workloads.chat.engine.sampler import Completion

if TYPE_CHECKING:
    from groupwise.workloads.chat.workload import ChatWorkload

_PASSED = "passed"
_SALT = 0x6576616C  # "eval": keeps the random numbers apart from those of training


@dataclass(frozen=True)
class GradedSamples:
    """Completions of held-out prompts: `samples_per_prompt` of each, one prompt after another."""

    num_prompts: int
    samples_per_prompt: int
    completions: list[Completion]
    rewards: Mapping[str, Tensor]
    passed: Bool[Tensor, "prompts samples"]
    """A completion whose reward is missing has not passed."""

    @property
    def passed_by_prompt(self) -> list[int]:
        """How many samples of each prompt passed."""
        return self.passed.sum(1).tolist()

    def pass_at(self) -> dict[int, tuple[float, float]]:
        """pass@k and its standard error over prompts, for k = 1, 2, 4, ... samples."""
        samples = self.samples_per_prompt
        return {k: mean_pass_at(k, samples=samples, passed=self.passed_by_prompt) for k in powers_up_to(samples)}

    @property
    def truncated_fraction(self) -> float:
        return sum(not completion.stopped for completion in self.completions) / len(self.completions)

    def mean_tokens(self, selected: Bool[Tensor, "prompts samples"] | None = None) -> float:
        """Mean length of all completions, or of the selected ones; NaN where there is none."""
        tokens = torch.tensor([float(len(completion)) for completion in self.completions])
        return (tokens if selected is None else tokens[selected.flatten()]).mean().item()


def evaluate_prompts(workload: ChatWorkload, rows: Tensor) -> dict[str, Tensor]:
    """For evaluations during training: rewards, sampled and greedy, and what passed, of these held-out prompts."""
    held_out, samples_per_prompt = workload.components.held_out, workload.config.eval.samples_per_prompt
    assert held_out is not None
    sampled = sample_and_grade(workload, held_out, rows, samples_per_prompt=samples_per_prompt)
    greedy = sample_and_grade(workload, held_out, rows, samples_per_prompt=1, greedy=True)
    columns = {
        **{f"{name}_sampled": values for name, values in sampled.rewards.items()},
        "completion_tokens": torch.tensor([float(len(completion)) for completion in sampled.completions]),
        "truncated_fraction": torch.tensor([float(not completion.stopped) for completion in sampled.completions]),
    }
    return {
        **{name: column.view(len(rows), samples_per_prompt) for name, column in columns.items()},
        **{f"{name}_greedy": values for name, values in greedy.rewards.items()},
        _PASSED: sampled.passed,
    }


def evaluation_metrics(columns: Mapping[str, Tensor]) -> dict[str, float]:
    """Means over all samples, and pass@k."""
    passed = columns[_PASSED]
    samples, passed_by_prompt = passed.shape[1], passed.sum(1).tolist()
    return {
        **{name: column.nanmean().item() for name, column in columns.items() if name != _PASSED},
        **{
            f"pass@{k}": mean_pass_at(k, samples=samples, passed=passed_by_prompt)[0]
            for k in powers_up_to(samples)
            if k > 1
        },
    }


def sample_and_grade(
    workload: ChatWorkload, prompts: PromptSet, rows: Tensor, *, samples_per_prompt: int, greedy: bool = False
) -> GradedSamples:
    """Complete these prompts and compute the rewards.

    Random numbers depend on eval.seed, prompt and sample alone: the same each time, on every rank.
    """
    config = workload.config.eval
    prompt_of_row = rows.repeat_interleave(samples_per_prompt)
    rollout_rows = RolloutRows(
        seed=int(random_bits(_SALT, config.seed)),
        step=0,
        rows_per_pass=len(prompt_of_row),
        group=prompt_of_row,
        member=torch.arange(samples_per_prompt).repeat(len(rows)),
        condition=prompt_of_row,
    )
    sampling = replace(workload.sampling, temperature=0.0) if greedy else workload.sampling
    decode_rows = min(workload.row_limits["decode_rows"], workload.row_limits["eval_rows"])
    rollouts = workload.sample_completions(prompts, rollout_rows, sampling, decode_rows=decode_rows)
    rewards = workload.reward_terms(prompts, rollouts).per_rollout
    first_reward = next(iter(rewards.values()))
    passed = (first_reward >= config.pass_threshold).view(len(rows), samples_per_prompt)
    return GradedSamples(len(rows), samples_per_prompt, rollouts.data["completion"], rewards, passed)


def pass_at(k: int, *, samples: int, passed: int) -> float:
    """1 - C(n - c, k) / C(n, k): the probability that k of the n samples, c of which passed, include one that passed.

    Chen et al., "Evaluating large language models trained on code", arXiv 2107.03374. The plain 1 - (1 - c/n)^k draws
    the same sample more than once and is biased downwards.
    """
    require(1 <= k <= samples, "k of pass@k", k, f"from 1 to the {samples} samples of a prompt")
    require(0 <= passed <= samples, "the number of passed samples", passed, f"from 0 to {samples}")
    return 1 - comb(samples - passed, k) / comb(samples, k)


def mean_pass_at(k: int, *, samples: int, passed: Sequence[int]) -> tuple[float, float]:
    """Mean over prompts, and its standard error."""
    values = [pass_at(k, samples=samples, passed=count) for count in passed]
    return fmean(values), stdev(values) / sqrt(len(values)) if len(values) > 1 else float("nan")


def powers_up_to(samples: int) -> list[int]:
    """1, 2, 4, ... and the number of samples itself."""
    return sorted({*(2**n for n in range(samples.bit_length()) if 2**n <= samples), samples})
