"""Planned and counted memory of a controller's rollout on the embedded model: nothing remembered, no two rows alike.

python bench/memory_controller.py
"""

from __future__ import annotations

from dataclasses import replace

import torch

from groupwise.core.shape import Shape
from groupwise.plan.parts import Job
from groupwise.plan.trace import LiveBytes
from groupwise.recipes import load_recipe
from groupwise.train.setup import set_up
from groupwise.workloads.controller.executor import Request
from groupwise.workloads.controller.features import _join
from groupwise.workloads.controller.knobs import Knobs


def main() -> None:
    torch.set_num_threads(1)
    config = load_recipe("controller")
    config = replace(config, workload=replace(config.workload, estimator="counted", mosaics=8))
    workload = set_up(config).workload
    executor, token = workload.task.executor, workload.controller.features.latency_token
    questions = list({question.sample.name: question for question in workload.task.questions}.values())
    knobs = [Knobs("high", position, 7, 16) for position in executor.options.insertion_positions]
    for count in (8, 2):
        asked = questions[:count]
        with LiveBytes() as live:
            live.watch(*executor.adapter.model.parameters())
            weights = live.now
            heads = [[(question.sample, tier) for tier in executor.options.crops] for question in asked]
            prefix = _join([executor.prefix(each, token) for each in heads])
            executor.answer([Request(each.sample, knob) for each in asked for knob in knobs], prefix=prefix)
        counted, rows = live.peak - weights, count * len(knobs)
        job = Job(Shape(10**6, count, len(knobs), 1, rows, "whole"), all_at_once=False)
        parts = config.workload.memory().stages(job).rollout
        planned = sum(parts.values()) - sum(parts[name] for name in ("frozen model", "weights", "optimiser"))
        print(f"{rows} rows: counted {counted:,} bytes, planned {planned:,} ({planned / counted - 1:+.1%})")


if __name__ == "__main__":
    main()
