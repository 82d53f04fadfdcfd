"""`groupwise measure`: the latency of every configuration of one model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from groupwise.core.errors import UserError, require
from groupwise.latency.meter import LatencyMeter, find_model_parts
from groupwise.latency.records import LatencySummary, Timing, summarize
from groupwise.workloads.controller.model.adapters import Sample, adapter_for
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor
from groupwise.workloads.controller.model.knobs import KnobOptions, Knobs
from groupwise.workloads.controller.model.load import load_model, load_text_model, read_config
from groupwise.workloads.controller.tasks import EMBEDDED_MODELS

NO_TIER = "text"


@dataclass(frozen=True)
class MeasuredModel:
    name: str
    model: Any
    settings: tuple[Knobs, ...]
    """The configurations to measure; the full one is among them."""
    answer: Callable[[Knobs, int, int], object]
    """Gives one answer: (knobs, index of the run, tokens)."""

    @property
    def full(self) -> Knobs:
        """The finest tier with all blocks and experts."""
        return max(self.settings, key=lambda knobs: (knobs.blocks, knobs.top_k, self.tiers.index(knobs.tier)))

    @property
    def tiers(self) -> list[str]:
        """From coarse to fine."""
        return list(dict.fromkeys(knobs.tier for knobs in self.settings))


def load_measured_model(name: str, *, prompt_tokens: int) -> MeasuredModel:
    """An embedded model by its name, any other by its folder, which is asked random prompts of this length."""
    if name not in EMBEDDED_MODELS:
        if not (Path(name) / "config.json").is_file():
            raise UserError(
                f"There is no model '{name}': no such folder, or no config.json in it. Name a folder that"
                f" save_pretrained() of transformers has written, or an embedded model: {', '.join(EMBEDDED_MODELS)}."
            )
        if getattr(read_config(name), "vision_config", None) is None:
            return _text_model(name, load_text_model(name), prompt_tokens)
    loaded = load_model(name, dtype="auto")
    return with_executor(name, loaded.model, loaded.options, loaded.front_end.probe_samples([prompt_tokens]))


def with_executor(name: str, model: Any, options: KnobOptions, samples: Sequence[Sample]) -> MeasuredModel:
    """A model that answers through the executor. Every run asks another sample, so that no single one decides."""
    executor = Executor(adapter_for(model), options)

    def answer(knobs: Knobs, run: int, tokens: int) -> object:
        return executor.answer([AnswerRequest(samples[run % len(samples)], knobs)], max_new_tokens=tokens)

    return MeasuredModel(name, model, _grid(options), answer)


def _grid(options: KnobOptions) -> tuple[Knobs, ...]:
    """Every tier at every depth with all experts, and at every top-k with all blocks."""
    full, tiers = options.full, options.crops_by_tier
    by_depth = [replace(full, tier=tier, blocks=blocks) for tier in tiers for blocks in options.block_totals]
    by_top_k = [replace(full, tier=tier, top_k=top_k) for tier in tiers for top_k in options.top_ks]
    return tuple(dict.fromkeys([*by_depth, *by_top_k]))


def _text_model(name: str, model: Any, prompt_tokens: int) -> MeasuredModel:
    """A model without a vision tower has no knobs here: `generate` answers."""
    config = model.config
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(config.vocab_size, (1, prompt_tokens), generator=generator).to(model.device)
    only = Knobs(NO_TIER, 1, getattr(config, "num_experts_per_tok", None) or 1, config.num_hidden_layers)

    def answer(_: Knobs, __: int, tokens: int) -> object:
        exactly = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **exactly)

    return MeasuredModel(name, model, (only,), answer)


def measure(
    subject: MeasuredModel,
    *,
    warm_up: int,
    runs: int,
    new_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
    after_answer: Callable[[], None] = lambda: None,
) -> dict[Knobs, LatencySummary]:
    """Configurations are interleaved, round after round, so that slowdowns affect all of them equally."""
    require(runs >= 1, "runs", runs, "1 or more")
    require(warm_up >= 0, "warm_up", warm_up, "0 or more")
    require(new_tokens >= 1, "new_tokens", new_tokens, "1 or more")
    meter = LatencyMeter(find_model_parts(subject.model), clock=clock)
    timings: dict[Knobs, list[Timing]] = {knobs: [] for knobs in subject.settings}
    for run in range(warm_up + runs):
        for knobs in subject.settings:
            timings[knobs].append(meter.time(partial(subject.answer, knobs, run, new_tokens)))
            after_answer()
    return {knobs: summarize(measured[warm_up:]) for knobs, measured in timings.items()}
