"""The final report of the embedded task: the model before and after training, between the truth and an upper bound.

The upper bound is the same network, pretrained for as many steps from the same fork, but on exact camera labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from groupwise.dist.devices import move_module
from groupwise.workloads.base import EvaluationReport, ReportTable
from groupwise.workloads.flow.evaluate import generate_clips
from groupwise.workloads.flow.models.base import FlowModel
from groupwise.workloads.flow.rewards import clip_rewards, weighted_sum
from groupwise.workloads.flow.sampling.encodings import ConditioningCache
from groupwise.workloads.flow.task import Condition
from groupwise.workloads.flow.tasks.sprites.charts import draw_gif, draw_sheet, requested_clips
from groupwise.workloads.flow.tasks.sprites.config import ASSET
from groupwise.workloads.flow.tasks.sprites.model import SpritesModel, load_sprites

if TYPE_CHECKING:
    from groupwise.workloads.flow.workload import FlowWorkload

_NUM_DRAWN = 6
_NOT_REWARDED = ("floor", "PSNR (dB)")
_LABELS = {"base": "before", "trained": "after GRPO", "upper": "exact labels"}

Metrics = Mapping[str, Tensor]
"""Of each clip, by name."""


@dataclass(frozen=True)
class Mean:
    value: float
    half_width: float
    """Of its 95 % confidence interval over the conditions."""

    @classmethod
    def of(cls, values: Tensor) -> Mean:
        return cls(values.mean().item(), 1.96 * values.std().item() / len(values) ** 0.5)


def compare_models(workload: FlowWorkload, conditions: Sequence[Condition]) -> EvaluationReport:
    """Metrics of base, trained and upper model and of the true clips, on conditions used for nothing else."""
    clips = _clips_of_each(workload, conditions)
    means = {name: _means(workload, conditions, of_model) for name, of_model in clips.items()}
    rows = {metric: {name: of_model[metric] for name, of_model in means.items()} for metric in means["base"]}
    shares = {
        metric: share_of_the_way(*(row[name] for name in ("base", "trained", "upper"))) for metric, row in rows.items()
    }
    together = [share for metric in _NOT_REWARDED if (share := shares[metric]) is not None]
    not_rewarded = sum(together) / len(together) if together else None
    shown = {name: clips[name][:_NUM_DRAWN] for name in _LABELS}
    drawn = (conditions[:_NUM_DRAWN], {label: shown[name] for name, label in _LABELS.items()})
    return EvaluationReport(
        metrics={
            "comparison": {
                "conditions": len(conditions),
                "metrics": {
                    metric: {
                        **{name: mean.value for name, mean in row.items()},
                        "half_width_95": {name: mean.half_width for name, mean in row.items()},
                        "share_of_the_way": shares[metric],
                    }
                    for metric, row in rows.items()
                },
                "share_of_the_way": {"rewarded": shares["reward"], "not rewarded": not_rewarded},
            }
        },
        tables=[_table(rows, shares, not_rewarded, len(conditions))],
        images={
            "before-after.gif": lambda path: draw_gif(*drawn, path),
            "before-after.png": lambda path: draw_sheet(*drawn, path),
        },
    )


def share_of_the_way(base: Mean, trained: Mean, upper: Mean) -> float | None:
    """How far training went from the base model to the upper bound; None where those two hardly differ."""
    way = upper.value - base.value
    if abs(way) <= base.half_width + upper.half_width:
        return None
    return (trained.value - base.value) / way


def _clips_of_each(workload: FlowWorkload, conditions: Sequence[Condition]) -> dict[str, Tensor]:
    upper: FlowModel = SpritesModel(move_module(load_sprites(ASSET / "upper"), workload.device))
    limits = {"max_cached": len(conditions), "encode_rows": workload.row_limits["encode_rows"]}
    cache, indices = ConditioningCache(workload.model, conditions, **limits), torch.arange(len(conditions))
    with workload.model.reference():
        base = generate_clips(workload, cache, indices)
    return {
        "base": base,
        "trained": generate_clips(workload, cache, indices),
        "upper": generate_clips(workload, cache, indices, model=upper),
        "truth": requested_clips(conditions),
    }


def _means(workload: FlowWorkload, conditions: Sequence[Condition], clips: Tensor) -> dict[str, Mean]:
    task = workload.task
    terms = clip_rewards({**task.rewards, **task.eval_metrics}, conditions, clips)
    values = {"reward": weighted_sum(terms, task.weights), **terms.per_rollout}
    return {name: Mean.of(column) for name, column in values.items()}


def _table(
    rows: Mapping[str, Mapping[str, Mean]], shares: Mapping[str, float | None], not_rewarded: float | None, count: int
) -> ReportTable:
    cells = [
        [metric, *(f"{mean.value:.3f}" for mean in row.values()), _percent(shares[metric])]
        for metric, row in rows.items()
    ]
    return ReportTable(
        title=f"{count} conditions used for nothing else",
        columns=("", *next(iter(rows.values())), "share of the way"),
        rows=cells,
        note="upper: the same network pretrained on exact labels. Share of the way from base to upper:"
        f" {_percent(shares['reward'])} of the reward, {_percent(not_rewarded)} of floor and PSNR, which are not"
        " rewarded.",
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
