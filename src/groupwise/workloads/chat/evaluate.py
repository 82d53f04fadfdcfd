"""Completions of held-out prompts, judged: what the policy does now.
pass@k: the chance that at least one of k completions passes, without bias from n samples of which c passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb, sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from groupwise.core.errors import require
from groupwise.core.placement import RolloutRows
from groupwise.core.randomness import random_bits
from groupwise.workloads.chat.data import PromptSet
from groupwise.workloads.chat.engine.sampler import Completion

if TYPE_CHECKING:
    from groupwise.workloads.chat.workload import ChatWorkload


def pass_at(k: int, *, samples: int, passed: int) -> float:
    """1 - C(n - c, k) / C(n, k): the share of all k-subsets of the n samples that hold a passed one.

    Chen et al., "Evaluating large language models trained on code", arXiv 2107.03374. The plain 1 - (1 - c/n)^k draws
    the same sample more than once, and is too low.
    """
    require(1 <= k <= samples, "k of pass@k", k, f"from 1 to the {samples} samples of a question")
    require(0 <= passed <= samples, "the number of passed samples", passed, f"from 0 to {samples}")
    return 1 - comb(samples - passed, k) / comb(samples, k)


def mean_pass_at(k: int, *, samples: int, passed: Sequence[int]) -> tuple[float, float]:
    """Over questions: the mean, and its standard error."""
    values = [pass_at(k, samples=samples, passed=count) for count in passed]
    return fmean(values), stdev(values) / sqrt(len(values)) if len(values) > 1 else float("nan")


def powers_up_to(samples: int) -> list[int]:
    """1, 2, 4, ... and the number of samples itself."""
    return sorted({*(2**n for n in range(samples.bit_length()) if 2**n <= samples), samples})


_SALT = 0x6576616C  # "eval": keeps these random numbers apart from those of training


@dataclass(frozen=True)
class GradedSamples:
    """`samples` completions of each question, row after row of [questions, samples]."""

    questions: int
    samples: int
    completions: list[Completion]
    terms: Mapping[str, Tensor]
    passed: Tensor
    """[questions, samples]; a missing reward has not passed."""

    @property
    def counts(self) -> list[int]:
        """How many samples of each question passed."""
        return self.passed.sum(1).tolist()

    def pass_at(self) -> dict[int, tuple[float, float]]:
        """pass@k and its standard error over questions, for 1, 2, 4, ... samples."""
        return {k: mean_pass_at(k, samples=self.samples, passed=self.counts) for k in powers_up_to(self.samples)}

    @property
    def truncated_share(self) -> float:
        return sum(not completion.stopped for completion in self.completions) / len(self.completions)

    def mean_tokens(self, wanted: Tensor | None = None) -> float:
        """Of all completions, or of some of them; NaN where there is none."""
        tokens = torch.tensor([float(len(completion)) for completion in self.completions])
        return (tokens if wanted is None else tokens[wanted.flatten()]).mean().item()


def sample_and_grade(
    workload: ChatWorkload, prompts: PromptSet, *, samples: int, greedy: bool = False
) -> GradedSamples:
    """Complete the first `eval.questions` prompts `samples` times each, and judge the completions.

    Random numbers depend on eval.seed, question and sample alone: the same each time, on every rank.
    """
    config = workload.config.eval
    questions = min(len(prompts), config.questions or len(prompts))
    of_row = torch.arange(questions).repeat_interleave(samples)
    rows = RolloutRows(
        seed=int(random_bits(_SALT, config.seed)),
        step=0,
        rows_per_pass=len(of_row),
        group=of_row,
        member=torch.arange(samples).repeat(questions),
        condition=of_row,
    )
    sampling = replace(workload.sampling, temperature=0.0) if greedy else workload.sampling
    decode_rows = min(workload.row_limits["decode_rows"], workload.row_limits["eval_rows"])
    rollouts = workload.complete(prompts, rows, sampling, decode_rows=decode_rows)
    terms = workload.judged(prompts, rollouts).per_rollout
    first = next(iter(terms.values()))
    passed = (first >= config.pass_from).view(questions, samples)
    return GradedSamples(questions, samples, rollouts.data["completion"], terms, passed)


def evaluation_metrics(workload: ChatWorkload) -> dict[str, float]:
    """For evaluations while training: means of every reward, sampled and greedy, and pass@k."""
    if workload.parts.held_out is None:
        return {}
    sampled = sample_and_grade(workload, workload.parts.held_out, samples=workload.config.eval.samples)
    greedy = sample_and_grade(workload, workload.parts.held_out, samples=1, greedy=True)
    return {
        **{f"{name}, sampled": values.nanmean().item() for name, values in sampled.terms.items()},
        **{f"{name}, greedy": values.nanmean().item() for name, values in greedy.terms.items()},
        **{f"pass@{k}": value for k, (value, _) in sampled.pass_at().items() if k > 1},
        "tokens": sampled.mean_tokens(),
        "truncated share": sampled.truncated_share,
    }
