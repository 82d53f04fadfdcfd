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

from groupwise.workloads.base import Report, ReportTable
from groupwise.workloads.chat.config import ChatConfig, Sampling
from groupwise.workloads.chat.engine.sampler import Completion
from groupwise.workloads.chat.evaluate import Exam, sit

if TYPE_CHECKING:
    from groupwise.workloads.chat.data import Prompts
    from groupwise.workloads.chat.workload import ChatWorkload


PICTURE = "eval.png"
TRAINED, UNTRAINED = "trained", "untrained"
_SHOWN = 6
Figures = Mapping[str, Any]


def report(workload: ChatWorkload) -> Report | None:
    """The trained policy, and the one before training, on the same questions with the same random numbers."""
    prompts, config = workload.parts.held_out, workload.config.eval
    if prompts is None:
        return None
    exams = {TRAINED: (workload, sit(workload, prompts, samples=config.report_samples))}
    greedy = {TRAINED: sit(workload, prompts, samples=1, greedy=True)}
    if config.baseline:
        before = untrained(workload)
        before.stage_rows, before.shrinkable = workload.stage_rows, workload.shrinkable
        exams = {UNTRAINED: (before, sit(before, prompts, samples=config.report_samples)), **exams}
        greedy[UNTRAINED] = sit(before, prompts, samples=1, greedy=True)
    figures = {
        "questions": exams[TRAINED][1].questions,
        "samples": config.report_samples,
        "passes": f"{next(iter(workload.parts.functions))} >= {config.pass_from:g}",
        "policies": {name: _figures(exam, greedy[name]) for name, (_, exam) in exams.items()},
        "said": _said(workload, prompts, exams[TRAINED][1]),
    }
    return Report({"report": figures}, tables(figures), {PICTURE: partial(draw, figures)})


def untrained(workload: ChatWorkload) -> ChatWorkload:
    """The same workload with the policy as it was loaded."""
    from dataclasses import replace

    from groupwise.workloads.chat.build import first_policy
    from groupwise.workloads.chat.workload import ChatWorkload

    policy = first_policy(workload.config, workload.parts.policy.device)
    return ChatWorkload(replace(workload.parts, policy=policy), workload.config)


def _figures(exam: Exam, greedy: Exam) -> dict[str, Any]:
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


def _said(workload: ChatWorkload, prompts: Prompts, exam: Exam) -> list[dict[str, Any]]:
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


def _asked(workload: ChatWorkload, prompts: Prompts, nth: int) -> str:
    if prompts.is_dialogue:
        return " / ".join(str(message["content"]) for message in prompts.shown[nth])
    text: str = workload.parts.tokenizer.decode(list(prompts.ids[nth]))
    return text


def tables(figures: Figures) -> list[ReportTable]:
    return [_pass_table(figures), _length_table(figures), _said_table(figures)]


def _pass_table(figures: Figures) -> ReportTable:
    policies = figures["policies"]
    ks = list(policies[TRAINED]["pass_at"])
    rows = [
        [name, f"{each['greedy']:.1%}", *(_with_error(each["pass_at"][k]) for k in ks)]
        for name, each in policies.items()
    ]
    return ReportTable(
        f"pass@k on {figures['questions']} held-out questions",
        ["policy", "greedy", *(f"pass@{k}" for k in ks)],
        rows,
        f"Unbiased, from {figures['samples']} samples a question; ± is one standard error over questions. A completion"
        f" passes with {figures['passes']}.",
    )


def _with_error(entry: Mapping[str, float]) -> str:
    return f"{entry['mean']:.1%} ±{100 * entry['error']:.1f}"


def _length_table(figures: Figures) -> ReportTable:
    rows = [
        [
            name,
            *(f"{value:.3f}" for value in each["rewards"].values()),
            f"{each['tokens']:.1f}",
            _tokens(each["tokens_passed"]),
            _tokens(each["tokens_failed"]),
            f"{each['truncated_share']:.1%}",
        ]
        for name, each in figures["policies"].items()
    ]
    terms = list(figures["policies"][TRAINED]["rewards"])
    return ReportTable("Rewards and tokens", ["policy", *terms, "tokens", "passed", "failed", "truncated"], rows)


def _tokens(mean: float) -> str:
    return "none" if isnan(mean) else f"{mean:.1f}"


def _said_table(figures: Figures) -> ReportTable:
    rows = [
        [said["prompt"], said["completion"].strip(), "yes" if said["passed"] else "no", f"{said['passed_share']:.0%}"]
        for said in figures["said"]
    ]
    return ReportTable("First samples of the trained policy", ["prompt", "completion", "passed", "of all"], rows)


def draw(figures: Figures, path: Path) -> None:
    """pass@k by k, and how many questions passed how often."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    colours = {UNTRAINED: "#223355", TRAINED: "#cc3311"}
    for nth, (name, each) in enumerate(figures["policies"].items()):
        ks = [int(k) for k in each["pass_at"]]
        means = [100 * entry["mean"] for entry in each["pass_at"].values()]
        errors = [100 * entry["error"] for entry in each["pass_at"].values()]
        left.errorbar(ks, means, errors, color=colours[name], marker="o", capsize=3, label=name)
        counts = each["questions_by_passed"]
        places = [number + 0.4 * (nth - 0.5) for number in range(len(counts))]
        right.bar(places, counts, width=0.4, color=colours[name], label=name)
    left.set_xscale("log", base=2)
    left.set_xticks(ks, [str(k) for k in ks])
    left.set(xlabel="k", ylabel="pass@k, % (± one standard error)", title="At least one of k passes")
    right.set_xticks(range(0, figures["samples"] + 1, max(1, figures["samples"] // 8)))
    right.set(xlabel=f"samples that passed, of {figures['samples']}", ylabel="questions", title="How sure it is")
    for axes in (left, right):
        axes.legend(fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{figures['questions']} held-out questions", fontweight="bold")
    figure.savefig(path)


TRUNCATED = "truncated_share"


def measures_of(completions: Sequence[Completion], advantages: Tensor) -> dict[str, Tensor]:
    """One number a row; NaN where a row has no part in a figure."""
    tokens = torch.tensor([float(len(completion)) for completion in completions])
    stopped = torch.tensor([completion.stopped for completion in completions])
    entropies = torch.stack([completion.entropies.double().mean() for completion in completions])
    return {
        "tokens": tokens,
        "tokens_better": tokens.masked_fill(advantages <= 0, torch.nan),
        "tokens_worse": tokens.masked_fill(advantages >= 0, torch.nan),
        "tokens_stopped": tokens.masked_fill(~stopped, torch.nan),
        TRUNCATED: (~stopped).double(),
        "entropy_sampled": entropies,
    }


def alarm_of(figures: Mapping[str, float], config: ChatConfig, sampling: Sampling) -> str | None:
    """A sentence when nearly all completions were cut off, so that rewards say little about them."""
    share = figures[TRUNCATED]
    if share < config.truncation_alarm:
        return None
    return (
        f"{share:.0%} of this step's completions reached sampling.max_new_tokens {sampling.max_new_tokens} without a"
        " stop token: what they earn says little. Raise max_new_tokens, check that the prompt's template and the stop"
        f" tokens {list(sampling.stop_ids)} are the model's, or reward shorter answers (judge.functions 'length')."
    )
