"""What `groupwise eval` says of a chat run: pass@k on held-out prompts, beside the untrained policy.
What is watched of a step's completions: lengths, truncation, certainty; and when to raise the alarm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from groupwise.workloads.chat.engine.sampler import Completion
from groupwise.workloads.chat.evaluate import GradedSamples, sample_and_grade

if TYPE_CHECKING:
    from groupwise.workloads.chat.data import PromptSet
    from groupwise.workloads.chat.workload import ChatWorkload


PICTURE = "eval.png"
TRAINED, UNTRAINED = "trained", "untrained"
_SHOWN = 6
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
        said: list[Completion] = rollouts.data["completion"]
        rows, prompts = rollouts.data["condition"].tolist(), self._workload.parts.training
        answers = prompts.columns.get(self._workload.config.rewards.answer_column)
        return [
            {
                "prompt": self._workload.parts.tokenizer.decode(list(prompts.ids[row])),
                "completion": text,
                **({"answer": answers[row]} if answers else {}),
                "tokens": len(completion),
                "truncated": not completion.stopped,
            }
            for row, text, completion in zip(rows, self._workload.texts(said), said, strict=True)
        ]

    def preflight_notes(self) -> Sequence[str]:
        why, stops = self._workload.parts.policy.why_plain, self._workload.parts.sampling.stop_ids
        named = ", ".join(map(repr, self._workload.parts.tokenizer.convert_ids_to_tokens(list(stops))))
        told = [f"a completion ends with {named}, or after {self._workload.parts.sampling.max_new_tokens} tokens"]
        train, held_out = self._workload.config.data.train, self._workload.config.data.held_out
        if ":" in held_out and held_out.partition(":")[0] != train.partition(":")[0]:  # the recipe's, not the user's
            told.append(
                f"evaluation uses the prompts of {held_out}, not ones like yours: set data.held_out, or '' for none"
            )
        for name, prompts in (("training", self._workload.parts.training), ("held-out", self._workload.parts.held_out)):
            if prompts is not None and prompts.skipped:
                told.append(f"{name} rows skipped: {format_counts(prompts.skipped)}; {len(prompts)} are left")
        return [*told, *([f"prompts are not shared within their group: {why}"] if why else [])]

    def final_report(self) -> EvaluationReport | None:
        return report(self._workload)


def report(workload: ChatWorkload) -> EvaluationReport | None:
    """The trained policy, and the one before training, on the same questions with the same random numbers."""
    prompts, config = workload.parts.held_out, workload.config.eval
    if prompts is None:
        return None
    exams = {TRAINED: (workload, sample_and_grade(workload, prompts, samples=config.report_samples))}
    greedy = {TRAINED: sample_and_grade(workload, prompts, samples=1, greedy=True)}
    if config.baseline:
        before = untrained(workload)
        before.stage_rows, before.shrinkable = workload.stage_rows, workload.shrinkable
        exams = {UNTRAINED: (before, sample_and_grade(before, prompts, samples=config.report_samples)), **exams}
        greedy[UNTRAINED] = sample_and_grade(before, prompts, samples=1, greedy=True)
    metrics = {
        "questions": exams[TRAINED][1].questions,
        "samples": config.report_samples,
        "passes": f"{next(iter(workload.parts.functions))} >= {config.pass_from:g}",
        "policies": {name: _metrics(exam, greedy[name]) for name, (_, exam) in exams.items()},
        "said": _example_completions(workload, prompts, exams[TRAINED][1]),
    }
    return EvaluationReport({"report": metrics}, tables(metrics), {PICTURE: partial(draw, metrics)})


def untrained(workload: ChatWorkload) -> ChatWorkload:
    """The same workload with the policy as it was loaded."""
    from dataclasses import replace

    from groupwise.workloads.chat.build import base_policy
    from groupwise.workloads.chat.workload import ChatWorkload

    policy = base_policy(workload.config, workload.parts.policy.device)
    return ChatWorkload(replace(workload.parts, policy=policy), workload.config)


def _metrics(exam: GradedSamples, greedy: GradedSamples) -> dict[str, Any]:
    counts = exam.counts
    return {
        "greedy": greedy.passed.double().mean().item(),
        "pass_at": {str(k): {"mean": mean, "error": error} for k, (mean, error) in exam.pass_at().items()},
        "rewards": {name: values.nanmean().item() for name, values in exam.terms.items()},
        "missing": {name: int(values.isnan().sum()) for name, values in exam.terms.items()},
        "truncated_share": exam.truncated_share,
        "tokens": exam.mean_tokens(),
        "tokens_passed": exam.mean_tokens(exam.passed),
        "tokens_failed": exam.mean_tokens(~exam.passed),
        "questions_by_passed": [counts.count(number) for number in range(exam.samples + 1)],
    }


def _example_completions(workload: ChatWorkload, prompts: PromptSet, exam: GradedSamples) -> list[dict[str, Any]]:
    """The first completion of some questions."""
    firsts = [exam.completions[nth * exam.samples] for nth in range(min(_SHOWN, exam.questions))]
    return [
        {
            "prompt": _asked(workload, prompts, nth),
            "completion": text,
            "passed": bool(exam.passed[nth, 0]),
            "passed_share": exam.passed[nth].double().mean().item(),
        }
        for nth, text in enumerate(workload.texts(firsts))
    ]


def _asked(workload: ChatWorkload, prompts: PromptSet, nth: int) -> str:
    if prompts.is_chat:
        return " / ".join(str(message["content"]) for message in prompts.reward_inputs[nth])
    text: str = workload.parts.tokenizer.decode(list(prompts.ids[nth]))
    return text


def tables(metrics: Metrics) -> list[ReportTable]:
    return [_pass_table(metrics), _length_table(metrics), _examples_table(metrics)]


def _pass_table(metrics: Metrics) -> ReportTable:
    policies = metrics["policies"]
    ks = list(policies[TRAINED]["pass_at"])
    rows = [
        [name, f"{each['greedy']:.1%}", *(_with_error(each["pass_at"][k]) for k in ks)]
        for name, each in policies.items()
    ]
    return ReportTable(
        f"pass@k on {metrics['questions']} held-out questions",
        ["policy", "greedy", *(f"pass@{k}" for k in ks)],
        rows,
        f"Unbiased, from {metrics['samples']} samples a question; ± is one standard error over questions. A completion"
        f" passes with {metrics['passes']}.",
    )


def _with_error(entry: Mapping[str, float]) -> str:
    return f"{entry['mean']:.1%} ±{100 * entry['error']:.1f}"


def _length_table(metrics: Metrics) -> ReportTable:
    rows = [
        [
            name,
            *(f"{value:.3f}" for value in each["rewards"].values()),
            f"{each['tokens']:.1f}",
            _tokens(each["tokens_passed"]),
            _tokens(each["tokens_failed"]),
            f"{each['truncated_share']:.1%}",
        ]
        for name, each in metrics["policies"].items()
    ]
    terms = list(metrics["policies"][TRAINED]["rewards"])
    return ReportTable("Rewards and tokens", ["policy", *terms, "tokens", "passed", "failed", "truncated"], rows)


def _tokens(mean: float) -> str:
    return "none" if isnan(mean) else f"{mean:.1f}"


def _examples_table(metrics: Metrics) -> ReportTable:
    rows = [
        [said["prompt"], said["completion"].strip(), "yes" if said["passed"] else "no", f"{said['passed_share']:.0%}"]
        for said in metrics["said"]
    ]
    return ReportTable("First samples of the trained policy", ["prompt", "completion", "passed", "of all"], rows)


def draw(metrics: Metrics, path: Path) -> None:
    """pass@k by k, and how many questions passed how often."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    colors = {UNTRAINED: "#223355", TRAINED: "#cc3311"}
    for nth, (name, each) in enumerate(metrics["policies"].items()):
        ks = [int(k) for k in each["pass_at"]]
        means = [100 * entry["mean"] for entry in each["pass_at"].values()]
        errors = [100 * entry["error"] for entry in each["pass_at"].values()]
        left.errorbar(ks, means, errors, color=colors[name], marker="o", capsize=3, label=name)
        counts = each["questions_by_passed"]
        places = [number + 0.4 * (nth - 0.5) for number in range(len(counts))]
        right.bar(places, counts, width=0.4, color=colors[name], label=name)
    left.set_xscale("log", base=2)
    left.set_xticks(ks, [str(k) for k in ks])
    left.set(xlabel="k", ylabel="pass@k, % (± one standard error)", title="At least one of k passes")
    right.set_xticks(range(0, metrics["samples"] + 1, max(1, metrics["samples"] // 8)))
    right.set(xlabel=f"samples that passed, of {metrics['samples']}", ylabel="questions", title="How sure it is")
    for axes in (left, right):
        axes.legend(fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{metrics['questions']} held-out questions", fontweight="bold")
    figure.savefig(path)


TRUNCATED_FRACTION = "truncated_share"


def completion_metrics(completions: Sequence[Completion], advantages: Tensor) -> dict[str, Tensor]:
    """One number a row; NaN where a row has no part in a figure."""
    tokens = torch.tensor([float(len(completion)) for completion in completions])
    stopped = torch.tensor([completion.stopped for completion in completions])
    entropies = torch.stack([completion.entropies.double().mean() for completion in completions])
    return {
        "tokens": tokens,
        "tokens_better": tokens.masked_fill(advantages <= 0, torch.nan),
        "tokens_worse": tokens.masked_fill(advantages >= 0, torch.nan),
        "tokens_stopped": tokens.masked_fill(~stopped, torch.nan),
        TRUNCATED_FRACTION: (~stopped).double(),
        "entropy_sampled": entropies,
    }


def truncation_warning(metrics: Mapping[str, float], config: ChatConfig, sampling: SamplingParams) -> str | None:
    """A sentence when nearly all completions were cut off, so that rewards say little about them."""
    share = metrics[TRUNCATED_FRACTION]
    if share < config.truncation_warning_at:
        return None
    return (
        f"{share:.0%} of this step's completions reached sampling.max_new_tokens {sampling.max_new_tokens} without a"
        " stop token: what they earn says little. Raise max_new_tokens, check that the prompt's template and the stop"
        f" tokens {list(sampling.stop_ids)} are the model's, or reward shorter answers (rewards.functions 'length')."
    )
