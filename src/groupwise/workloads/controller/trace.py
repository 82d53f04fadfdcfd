"""A controller's rollout and update followed with fake tensors: the executor's and network's real code, no memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor

from groupwise.memory.stages import StepSpec
from groupwise.memory.trace import LiveByteCounter, fake_tensors, replace_with_fake, trace_peak, trace_update
from groupwise.workloads.controller.conditions import make_conditions
from groupwise.workloads.controller.config import BudgetConfig
from groupwise.workloads.controller.latency.estimates import ProportionalEstimator
from groupwise.workloads.controller.memory import ControllerMemory
from groupwise.workloads.controller.model.adapters import Sample, adapter_for
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor
from groupwise.workloads.controller.model.knobs import KnobOptions, default_options
from groupwise.workloads.controller.policy.decide import Controller, HiddenStateCache, choices_to_knobs, replay_option
from groupwise.workloads.controller.policy.network import ControllerNetwork
from groupwise.workloads.controller.task import Question

_ONE_BUDGET = BudgetConfig((1.0,), enforcement="soft")


@dataclass(frozen=True)
class Followed:
    """What is held, and the two stages of one pass."""

    policy: ControllerNetwork
    weights: tuple[Tensor, ...]
    """Of the frozen model."""
    frozen: tuple[Tensor, ...]
    """With its buffers."""
    rollout: Callable[[], object]
    one_pass: Callable[[], Tensor]


def fake_controller(
    model_config: Any, memory: ControllerMemory, job: StepSpec, *, options: KnobOptions | None = None, fake: bool = True
) -> Followed:
    """A pass of questions that are all new, asked at the finest tier, no two rows alike: nothing is remembered."""
    dtype = torch.float32 if memory.number_bytes == 4 else torch.bfloat16
    with fake_tensors() if fake else nullcontext() as mode, LiveByteCounter():  # which answers where weights are drawn
        model = transformers.LlavaForConditionalGeneration._from_config(model_config, dtype=dtype).eval()
    adapter, crops = adapter_for(model), {tier: count - 1 for tier, count in memory.crops.items()}
    executor = Executor(adapter, options or replace(default_options(adapter), crops=crops))
    rows, knobs = job.shape.rows_per_pass, executor.options
    questions = [_question(nth, memory, model_config, fake=fake) for nth in range(job.prompts_in(rows))]
    policy = ControllerNetwork(memory.text.width, knobs)
    if mode is not None:
        replace_with_fake(policy, mode)
    controller = Controller(policy, HiddenStateCache(executor), torch.device("cpu"))
    conditions = make_conditions(questions, ProportionalEstimator(knobs), knobs, _ONE_BUDGET)
    of_row = torch.arange(rows) * len(questions) // rows
    choices = _distinct_paths(knobs, of_row)

    def rollout() -> object:
        decided = controller.decide(conditions, of_row, replay_option(choices))
        asked = zip(conditions.question_of(of_row), choices_to_knobs(knobs, choices), strict=True)
        requests = [AnswerRequest(question.sample, each) for question, each in asked]
        return executor.answer(requests, prefix=decided.prefix, max_new_tokens=memory.new_tokens)

    def one_pass() -> Tensor:
        logp = controller.decide(conditions, of_row, replay_option(choices)).logp
        return (logp - logp.detach()).exp().mean()

    weights = tuple(model.parameters())
    return Followed(policy, weights, (*weights, *model.buffers()), rollout, one_pass)


def followed_rollout(found: Followed) -> int:
    """Highest bytes of a rollout's pass, with AdamW's moments."""
    trained = tuple(found.policy.parameters())
    with fake_tensors():
        moments = [torch.empty_like(weight) for weight in trained for _ in range(2)]
    return trace_peak(found.rollout, *found.frozen, *trained, *found.policy.buffers(), *moments)


def traced_controller(
    model_config: Any, memory: ControllerMemory, job: StepSpec, options: KnobOptions | None = None
) -> dict[str, int]:
    """Highest bytes of a rollout's pass and of the update's last one."""
    found = fake_controller(model_config, memory, job, options=options)
    return {"rollout": followed_rollout(found), "update": followed_update(found, job)}


def followed_update(found: Followed, job: StepSpec) -> int:
    """Highest bytes of the update's last pass: the model is held and not asked, since rollouts have remembered it."""
    with LiveByteCounter(), torch.no_grad():
        found.one_pass()
    return trace_update(found.policy, found.one_pass, job, more=found.frozen)


def _question(nth: int, memory: ControllerMemory, model_config: Any, *, fake: bool) -> Question:
    vision = model_config.vision_config
    size = (vision.num_channels, vision.image_size, vision.image_size)
    with fake_tensors() if fake else nullcontext():
        crops = {tier: torch.zeros(count, *size) for tier, count in memory.crops.items()}
    sample = Sample(str(nth), crops, (0,) * memory.question_tokens)
    lengths = {tier: memory.prompt_tokens(count) for tier, count in memory.crops.items()}
    return Question(sample, f"question {nth}", ("",), lengths)


def _distinct_paths(options: KnobOptions, of_row: Tensor) -> Tensor:
    """Choices [rows, 4] at the finest tier that share no path among the rows of a question, the deepest ones first."""
    tier, ways = len(options.crops) - 1, dict[tuple[int, ...], tuple[int, int, int, int]]()
    every = (
        (tier, position, top_k, blocks)
        for blocks in reversed(range(len(options.block_totals)))
        for top_k in reversed(range(len(options.top_ks)))
        for position in range(len(options.insertion_positions))
    )
    for choice in every:
        (knobs,) = choices_to_knobs(options, torch.tensor([choice]))
        ways.setdefault(options.path(knobs), choice)
    full, *others = ways.values()
    known = [*others, full]  # the full path is the same from every position: last, so that positions are spread
    nth_of_question = [int((of_row[:row] == question).sum()) for row, question in enumerate(of_row.tolist())]
    return torch.tensor([known[nth % len(known)] for nth in nth_of_question])
