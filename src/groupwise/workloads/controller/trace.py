"""Peak memory of a controller's rollout and update, traced with fake tensors through the real executor and network."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from groupwise.memory.stages import StepSpec
from groupwise.memory.trace import LiveByteCounter, TracedStep, fake_tensors, replace_with_fake, trace_step
from groupwise.workloads.controller.conditions import make_conditions
from groupwise.workloads.controller.config import BudgetConfig
from groupwise.workloads.controller.latency.estimates import ProportionalEstimator
from groupwise.workloads.controller.memory import ControllerMemory, MolmoeVision
from groupwise.workloads.controller.model.adapters import Sample, adapter_for, default_options
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor
from groupwise.workloads.controller.model.images import CropShape, LazyCrops
from groupwise.workloads.controller.model.knobs import KnobOptions
from groupwise.workloads.controller.model.molmoe.modeling import MolmoeConfig, MolmoeForConditionalGeneration
from groupwise.workloads.controller.model.molmoe.tiling import longest_tiling
from groupwise.workloads.controller.policy.decide import Controller, choices_to_knobs, replay_option
from groupwise.workloads.controller.policy.hidden_states import HiddenStateCache
from groupwise.workloads.controller.policy.network import ControllerNetwork
from groupwise.workloads.controller.task import Question

_ONE_BUDGET = BudgetConfig((1.0,), enforcement="soft")


def trace_controller(
    model_config: Any, memory: ControllerMemory, spec: StepSpec, options: KnobOptions | None = None
) -> dict[str, int]:
    """Peak bytes of a rollout's pass and of the update's last one."""
    return trace_step(controller_step(model_config, memory, spec, options=options), spec)


def controller_step(
    model_config: Any,
    memory: ControllerMemory,
    spec: StepSpec,
    *,
    options: KnobOptions | None = None,
    fake: bool = True,
) -> TracedStep:
    """A pass of new questions at the finest tier, no two rows alike: nothing is cached.

    An update holds the frozen model but does not run it, since its rollouts have cached the hidden states.
    """
    executor, mode = _executor(model_config, memory, options, fake=fake)
    rows, knobs = spec.shape.largest_pass, executor.options
    questions = [_question(index, memory, model_config, fake=fake) for index in range(spec.conditions_in(rows))]
    policy = ControllerNetwork(memory.text.width, knobs, sees_overview=memory.sees_overview)
    if mode is not None:
        replace_with_fake(policy, mode)
    controller = Controller(policy, HiddenStateCache(executor), torch.device("cpu"))
    conditions = make_conditions(questions, ProportionalEstimator(knobs), knobs, _ONE_BUDGET)
    question_of_row = torch.arange(rows) * len(questions) // rows
    choices = _distinct_paths(knobs, question_of_row)

    def rollout() -> object:
        decisions = controller.decide(conditions, question_of_row, replay_option(choices))
        pairs = zip(conditions.question_of(question_of_row), choices_to_knobs(knobs, choices), strict=True)
        requests = [AnswerRequest(question.sample, chosen) for question, chosen in pairs]
        return executor.answer(requests, prefix=decisions.prefix, max_new_tokens=memory.new_tokens)

    def update_pass() -> Tensor:
        logp = controller.decide(conditions, question_of_row, replay_option(choices)).logp
        return (logp - logp.detach()).exp().mean()

    model = executor.adapter.model
    held = (*model.parameters(), *model.buffers())
    return TracedStep(policy, update_pass, rollout, held=held, warm_up=update_pass)


def _executor(
    model_config: Any, memory: ControllerMemory, options: KnobOptions | None, *, fake: bool
) -> tuple[Executor, FakeTensorMode | None]:
    """The frozen model without its weights, or with random ones."""
    dtype = torch.float32 if memory.dtype_bytes == 4 else torch.bfloat16
    with (
        fake_tensors() if fake else nullcontext() as mode,
        LiveByteCounter(),
    ):  # supports value-dependent initialization
        model = _model_class(model_config)._from_config(model_config, dtype=dtype).eval()
    adapter, crops = adapter_for(model), {tier: count - 1 for tier, count in memory.crops.items()}
    return Executor(adapter, options or replace(default_options(adapter), crops_by_tier=crops)), mode


def _model_class(model_config: Any) -> Any:
    is_molmoe = isinstance(model_config, MolmoeConfig)
    return MolmoeForConditionalGeneration if is_molmoe else transformers.LlavaForConditionalGeneration


def _question(index: int, memory: ControllerMemory, model_config: Any, *, fake: bool) -> Question:
    vision, shapes = model_config.vision_config, dict[str, CropShape]()
    for tier, count in memory.crops.items():
        if isinstance(memory.vision, MolmoeVision):
            shapes[tier] = longest_tiling(count - 1).shape
        else:
            shapes[tier] = (count, vision.num_channels, vision.image_size, vision.image_size)
    with fake_tensors() if fake else nullcontext():
        crops = {tier: torch.zeros(shape[:4]) for tier, shape in shapes.items()}
    sample = Sample(str(index), LazyCrops(shapes, crops.__getitem__), (0,) * memory.question_tokens)
    lengths = {tier: memory.prompt_tokens(count) for tier, count in memory.crops.items()}
    return Question(sample, f"question {index}", ("",), lengths)


def _distinct_paths(options: KnobOptions, question_of_row: Tensor) -> Tensor:
    """Choices [rows, 4] at the finest tier; no two rows of a question take the same path, the deepest come first."""
    tier, choice_of_path = len(options.crops_by_tier) - 1, dict[tuple[int, ...], tuple[int, int, int, int]]()
    all_choices = (
        (tier, position, top_k, blocks)
        for blocks in reversed(range(len(options.block_totals)))
        for top_k in reversed(range(len(options.top_ks)))
        for position in range(len(options.insertion_positions))
    )
    for choice in all_choices:
        (knobs,) = choices_to_knobs(options, torch.tensor([choice]))
        choice_of_path.setdefault(options.block_path(knobs), choice)
    full, *others = choice_of_path.values()
    choices = [*others, full]  # the full path is the same from every position: last, so that positions are spread
    questions = question_of_row.tolist()
    return torch.tensor(
        [choices[questions[:row].count(question) % len(choices)] for row, question in enumerate(questions)]
    )
