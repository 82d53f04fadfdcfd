"""What people see of a chat run: metrics, warnings and samples of a step; tables and chart of `groupwise eval`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from groupwise.core.types import Rollouts
from groupwise.data.rows import format_counts
from groupwise.workloads.base import EvaluationReport, Reporter, ReportTable
from groupwise.workloads.chat.config import ChatConfig, SamplingParams
from groupwise.workloads.chat.engine.attention import FUSED_KERNELS
from groupwise.workloads.chat.engine.packing import choose_attention
from groupwise.workloads.chat.engine.policy import LanguageModelPolicy
from groupwise.workloads.chat.engine.sampler import Completion
from groupwise.workloads.chat.evaluate import GradedSamples, sample_and_grade

if TYPE_CHECKING:
    from groupwise.workloads.chat.data import PromptSet
    from groupwise.workloads.chat.workload import ChatWorkload

CHART_FILE = "eval.png"
TRAINED, BASE = "trained", "base"
TRUNCATED_FRACTION = "truncated_fraction"
_NUM_EXAMPLES = 6
_COLORS = {BASE: "#223355", TRAINED: "#cc3311"}
Metrics = Mapping[str, Any]


class ChatReporter(Reporter):
    """What people see of a chat run."""

    def __init__(self, workload: ChatWorkload):
        self._workload = workload

    def step_metrics(self, rollouts: Rollouts, advantages: Tensor) -> Mapping[str, Tensor]:
        return completion_metrics(rollouts.data["completion"], advantages)

    def step_warning(self, metrics: Mapping[str, float]) -> str | None:
        return truncation_warning(metrics, self._workload.config, self._workload.sampling)

    def describe_rollouts(self, rollouts: Rollouts) -> Sequence[Mapping[str, Any]]:
        completions: list[Completion] = rollouts.data["completion"]
        conditions, prompts = rollouts.data["condition"].tolist(), self._workload.components.training
        answers = prompts.columns.get(self._workload.config.rewards.answer_column)
        texts = self._workload.decode_completions(completions)
        return [
            {
                "prompt": self._workload.components.tokenizer.decode(list(prompts.ids[condition])),
                "completion": text,
                **({"answer": answers[condition]} if answers else {}),
                "tokens": len(completion),
                "truncated": not completion.stopped,
            }
            for condition, text, completion in zip(conditions, texts, completions, strict=True)
        ]

    def preflight_notes(self) -> Sequence[str]:
        components, data = self._workload.components, self._workload.config.data
        sampling = components.sampling
        stop_tokens = components.tokenizer.convert_ids_to_tokens(list(sampling.stop_token_ids))
        stops = ", ".join(map(repr, stop_tokens))
        notes = [f"a completion ends with {stops}, or after {sampling.max_new_tokens} tokens"]
        held_out_module = data.held_out.rpartition(":")[0]
        if held_out_module and held_out_module != data.train.rpartition(":")[0]:  # the recipe's, not the user's
            notes.append(
                f"evaluation uses the prompts of {data.held_out}, not ones like yours: set data.held_out, or '' for"
                " none"
            )
        for name, prompts in (("training", components.training), ("held-out", components.held_out)):
            if prompts is not None and prompts.skipped:
                notes.append(f"{name} rows skipped: {format_counts(prompts.skipped)}; {len(prompts)} are left")
        notes.append(_how_attention_runs(components.policy))
        return notes

    def start_warnings(self) -> Sequence[str]:
        policy = self._workload.components.policy
        if policy.plain_reason is None or policy.config.forward == "plain":
            return ()
        prompts = self._workload.components.training
        mean_prompt = statistics.fmean(map(len, prompts.ids))
        return [
            f"Prompts are not shared within their group, because {policy.plain_reason}: each row computes its whole"
            f" prompt, {mean_prompt:.0f} tokens on average, in the rollout and again in the update. With groups of G"
            " rows that is G times the prompt tokens. Take a model with plain attention layers, or set"
            " --workload.policy.forward plain to accept it."
        ]

    def final_report(self) -> EvaluationReport | None:
        return evaluation_report(self._workload)


def _how_attention_runs(policy: LanguageModelPolicy) -> str:
    """Which kernel, and why not a faster one."""
    if policy.plain_reason is not None:
        return f"prompts are not shared within their group: {policy.plain_reason}"
    chosen = choose_attention(policy.attention_shape)
    names = {"flex": "compiled flex attention", "products": "matrix products in float32"}
    names |= {kernel.name: f"torch's fused kernel ({kernel.operation})" for kernel in FUSED_KERNELS}
    reason = f" ({chosen.reason})" if chosen.reason else ""
    return f"prompts are shared; attention by {names[chosen.attend.name]}{reason}"


def completion_metrics(completions: Sequence[Completion], advantages: Tensor) -> dict[str, Tensor]:
    """One number a row; NaN where a row has no part in a metric."""
    tokens = torch.tensor([float(len(completion)) for completion in completions])
    stopped = torch.tensor([completion.stopped for completion in completions])
    entropies = torch.stack([completion.entropies.double().mean() for completion in completions])
    return {
        "completion_tokens": tokens,
        "completion_tokens_positive_advantage": tokens.masked_fill(advantages <= 0, torch.nan),
        "completion_tokens_negative_advantage": tokens.masked_fill(advantages >= 0, torch.nan),
        "completion_tokens_terminated": tokens.masked_fill(~stopped, torch.nan),
        TRUNCATED_FRACTION: (~stopped).double(),
        "rollout_entropy": entropies,
    }


def truncation_warning(metrics: Mapping[str, float], config: ChatConfig, sampling: SamplingParams) -> str | None:
    """A warning when nearly all completions were truncated, so that their rewards say little."""
    fraction = metrics[TRUNCATED_FRACTION]
    if fraction < config.truncation_warning_at:
        return None
    return (
        f"{fraction:.0%} of this step's completions reached sampling.max_new_tokens {sampling.max_new_tokens} without a"
        " stop token, so their rewards say little. Raise max_new_tokens, check that the prompt's template and the stop"
        f" tokens {list(sampling.stop_token_ids)} are the model's, or reward brevity (rewards.functions 'length')."
    )


def evaluation_report(workload: ChatWorkload) -> EvaluationReport | None:
    """The trained policy and the base model, on the same held-out prompts with the same random numbers."""
    prompts, config = workload.components.held_out, workload.config.eval
    if prompts is None:
        return None
    workloads = {TRAINED: workload}
    if config.compare_base_model:
        workloads = {BASE: _base_workload(workload), **workloads}
    policies = {}
    for name, evaluated in workloads.items():
        rows = torch.arange(workload.num_held_out)
        sampled = sample_and_grade(evaluated, prompts, rows, samples_per_prompt=config.report_samples_per_prompt)
        greedy = sample_and_grade(evaluated, prompts, rows, samples_per_prompt=1, greedy=True)
        policies[name] = _policy_metrics(sampled, greedy)
    metrics = {
        "num_prompts": sampled.num_prompts,
        "samples_per_prompt": config.report_samples_per_prompt,
        "pass_rule": f"{next(iter(workload.components.functions))} >= {config.pass_threshold:g}",
        "policies": policies,
        "examples": _example_completions(workload, prompts, sampled),  # the trained policy comes last
    }
    return EvaluationReport({"report": metrics}, tables(metrics), {CHART_FILE: partial(draw, metrics)})


def _base_workload(workload: ChatWorkload) -> ChatWorkload:
    """The same workload with the policy before training."""
    from groupwise.workloads.chat.build import base_policy
    from groupwise.workloads.chat.workload import ChatWorkload

    policy = base_policy(workload.config, workload.components.policy.device)
    base = ChatWorkload(replace(workload.components, policy=policy), workload.config)
    base.row_limits = workload.row_limits
    return base


def _policy_metrics(sampled: GradedSamples, greedy: GradedSamples) -> dict[str, Any]:
    counts = sampled.passed_by_prompt
    return {
        "greedy": greedy.passed.double().mean().item(),
        "pass_at": {str(k): {"mean": mean, "error": error} for k, (mean, error) in sampled.pass_at().items()},
        "rewards": {name: values.nanmean().item() for name, values in sampled.rewards.items()},
        "missing": {name: int(values.isnan().sum()) for name, values in sampled.rewards.items()},
        "truncated_fraction": sampled.truncated_fraction,
        "completion_tokens": sampled.mean_tokens(),
        "completion_tokens_passed": sampled.mean_tokens(sampled.passed),
        "completion_tokens_failed": sampled.mean_tokens(~sampled.passed),
        "prompts_by_passed": [counts.count(number) for number in range(sampled.samples_per_prompt + 1)],
    }


def _example_completions(workload: ChatWorkload, prompts: PromptSet, graded: GradedSamples) -> list[dict[str, Any]]:
    """The first completion of some prompts."""
    examples = range(min(_NUM_EXAMPLES, graded.num_prompts))
    texts = workload.decode_completions([graded.completions[index * graded.samples_per_prompt] for index in examples])
    return [
        {
            "prompt": _prompt_text(workload, prompts, index),
            "completion": text,
            "passed": bool(graded.passed[index, 0]),
            "passed_fraction": graded.passed[index].double().mean().item(),
        }
        for index, text in zip(examples, texts, strict=True)
    ]


def _prompt_text(workload: ChatWorkload, prompts: PromptSet, index: int) -> str:
    if prompts.is_chat:
        return " / ".join(str(message["content"]) for message in prompts.reward_inputs[index])
    text: str = workload.components.tokenizer.decode(list(prompts.ids[index]))
    return text


def tables(metrics: Metrics) -> list[ReportTable]:
    return [_pass_table(metrics), _length_table(metrics), _examples_table(metrics)]


def _pass_table(metrics: Metrics) -> ReportTable:
    ks = list(metrics["policies"][TRAINED]["pass_at"])
    return ReportTable(
        f"pass@k on {metrics['num_prompts']} held-out prompts",
        ["policy", "greedy", *(f"pass@{k}" for k in ks)],
        [
            [name, f"{policy['greedy']:.1%}", *(_format_with_error(policy["pass_at"][k]) for k in ks)]
            for name, policy in metrics["policies"].items()
        ],
        f"Unbiased, from {metrics['samples_per_prompt']} samples a prompt; ± is one standard error over prompts. A"
        f" completion passes with {metrics['pass_rule']}.",
    )


def _format_with_error(entry: Mapping[str, float]) -> str:
    return f"{entry['mean']:.1%} ±{100 * entry['error']:.1f}"


def _length_table(metrics: Metrics) -> ReportTable:
    rows = [
        [
            name,
            *(f"{value:.3f}" for value in policy["rewards"].values()),
            f"{policy['completion_tokens']:.1f}",
            _format_tokens(policy["completion_tokens_passed"]),
            _format_tokens(policy["completion_tokens_failed"]),
            f"{policy['truncated_fraction']:.1%}",
        ]
        for name, policy in metrics["policies"].items()
    ]
    rewards = list(metrics["policies"][TRAINED]["rewards"])
    return ReportTable("Rewards and tokens", ["policy", *rewards, "tokens", "passed", "failed", "truncated"], rows)


def _format_tokens(mean: float) -> str:
    return "none" if isnan(mean) else f"{mean:.1f}"


def _examples_table(metrics: Metrics) -> ReportTable:
    rows = [
        [
            example["prompt"],
            example["completion"].strip(),
            "yes" if example["passed"] else "no",
            f"{example['passed_fraction']:.0%}",
        ]
        for example in metrics["examples"]
    ]
    return ReportTable("First samples of the trained policy", ["prompt", "completion", "passed", "of all"], rows)


def draw(metrics: Metrics, path: Path) -> None:
    """pass@k by k, and a histogram of prompts by how many of their samples passed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for index, (name, policy) in enumerate(metrics["policies"].items()):
        ks = [int(k) for k in policy["pass_at"]]
        means = [100 * entry["mean"] for entry in policy["pass_at"].values()]
        errors = [100 * entry["error"] for entry in policy["pass_at"].values()]
        left.errorbar(ks, means, errors, color=_COLORS[name], marker="o", capsize=3, label=name)
        counts = policy["prompts_by_passed"]
        bars = [number + 0.4 * (index - 0.5) for number in range(len(counts))]
        right.bar(bars, counts, width=0.4, color=_COLORS[name], label=name)
    samples = metrics["samples_per_prompt"]
    left.set_xscale("log", base=2)
    left.set_xticks(ks, [str(k) for k in ks])
    left.set(xlabel="k", ylabel="pass@k, % (± one standard error)", title="At least one of k samples passes")
    right.set_xticks(range(0, samples + 1, max(1, samples // 8)))
    right.set(xlabel=f"samples that passed, of {samples}", ylabel="prompts", title="Prompts by passed samples")
    for axes in (left, right):
        axes.legend(fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{metrics['num_prompts']} held-out prompts", fontweight="bold")
    figure.savefig(path)
