"""A controller's task that is small enough to reason about: a tiny random model, linear costs, answers that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

import groupwise as gw
from groupwise.latency.records import DECODE, PREFILL, VISION, EstimatedLatency
from groupwise.workloads.controller.config import BudgetConfig, ControllerConfig
from groupwise.workloads.controller.model.adapters import LlavaAdapter
from groupwise.workloads.controller.model.answer_cache import AnswerCache
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor
from groupwise.workloads.controller.model.knobs import Knobs
from groupwise.workloads.controller.task import Question, Task
from tiny.llava import CROPS, OPTIONS, llava_olmoe, sample

TOKENS_PER_CROP = 4


@dataclass(frozen=True)
class LinearCost:
    """10 ms a crop, 5 a block, 2 for each expert of a block's token and 7 to decode; a tenth more in the worst case."""

    def estimate(self, prompt_tokens: Mapping[str, int], knobs: Sequence[Knobs]) -> list[EstimatedLatency]:
        return [self.one(each) for each in knobs]

    def one(self, knobs: Knobs) -> EstimatedLatency:
        path = OPTIONS.block_path(knobs)
        prefill = 5 * sum(k > 0 for k in path) + 2 * sum(path)
        stages = {VISION: 10.0 * (1 + CROPS[knobs.tier]), PREFILL: float(prefill), DECODE: 7.0}
        total = sum(stages.values())
        return EstimatedLatency(stages, total, 1.1 * total, 0.95)


EXECUTOR = Executor(LlavaAdapter(llava_olmoe()), OPTIONS)


def question(number: int, answers: tuple[str, ...] = ("?",)) -> Question:
    """Two kinds, told by the first word."""
    asked = (5 + number % 2, 7 + number % 3)
    own = replace(sample(number), name=f"sample {number} asks {asked}", question_ids=asked)
    tokens = {tier: TOKENS_PER_CROP * (1 + crops) + len(asked) for tier, crops in CROPS.items()}
    return Question(own, " ".join(map(str, asked)), answers, tokens, image=f"image {number}", kind=str(asked[0]))


def questions(numbers: range) -> list[Question]:
    """The right answer is what the model says with many blocks for one kind, and with few for the other."""
    asked = [question(number) for number in numbers]
    settings = [Knobs("medium", 2, 4, 8 if number % 2 else 5) for number in numbers]
    found, _ = EXECUTOR.answer([AnswerRequest(each.sample, knobs) for each, knobs in zip(asked, settings, strict=True)])
    return [replace(each, answers=(str(one.tokens[0]),)) for each, one in zip(asked, found, strict=True)]


@dataclass(frozen=True)
class SmallConfig(ControllerConfig):
    """Eight questions to train on, four held out."""

    def task(self, device: torch.device) -> Task:
        return Task(
            EXECUTOR,
            AnswerCache("tiny"),
            LinearCost(),
            questions(range(8)),
            questions(range(8, 12)),
            spell=lambda tokens: " ".join(map(str, tokens)),
            choose=lambda: questions(range(8, 20)),
            test=lambda: questions(range(20, 32)),
        )


def recipe() -> gw.Config:
    return gw.Config(
        SmallConfig(budget=BudgetConfig(values=(0.7, 1.2))),
        steps=25,
        conditions_per_step=8,
        group_size=8,
        rows_per_pass=32,
        reward=gw.RewardConfig(weights={"compute_cost": 0.0}),
        advantage=gw.AdvantageConfig(kind="centered"),
        optimizer=gw.OptimizerConfig(learning_rate=3e-3),
    )
