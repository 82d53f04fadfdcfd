"""A model's milliseconds in each of its settings.
A model to be measured: what can be asked of it, in which settings, and how one answer is given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image, fromarray

from groupwise.core.errors import UserError, require
from groupwise.latency.meter import LatencyMeter, find_model_parts
from groupwise.latency.records import LatencySummary, Timing, summarize
from groupwise.workloads.controller.model.adapters import Sample, adapter_for
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor
from groupwise.workloads.controller.model.images import ImageNormalization
from groupwise.workloads.controller.model.knobs import KnobOptions, Knobs
from groupwise.workloads.controller.model.load import (
    EMBEDDED,
    LoadedModel,
    default_device,
    load_model,
    load_text_model,
    read_config,
)

NO_TIER = "text"
_MOSAIC_SAMPLES = 24


@dataclass(frozen=True)
class MeasuredModel:
    name: str
    model: Any
    settings: tuple[Knobs, ...]
    """The dearest of all among them."""
    answer: Callable[[Knobs, int, int], object]
    """Give one answer in a setting: (knobs, number of the run, tokens)."""

    @property
    def full(self) -> Knobs:
        """The finest tier with all blocks and experts."""
        return max(self.settings, key=lambda knobs: (knobs.blocks, knobs.top_k, self.tiers.index(knobs.tier)))

    @property
    def tiers(self) -> list[str]:
        """From coarse to fine."""
        return list(dict.fromkeys(knobs.tier for knobs in self.settings))


def load_measured_model(name: str, *, prompt_tokens: int) -> MeasuredModel:
    """The embedded model by its name, any other by its folder. Prompts of the latter are random, of this length."""
    if name != EMBEDDED and not (Path(name) / "config.json").is_file():
        raise UserError(
            f"There is no model '{name}': no such folder, or no config.json in it. Name `{EMBEDDED}`, the embedded"
            " model, or a folder that save_pretrained() of transformers has written."
        )
    if name != EMBEDDED and getattr(read_config(name), "vision_config", None) is None:
        return _text_model(name, load_text_model(name), prompt_tokens)
    loaded = load_model(name, dtype="auto")
    return with_executor(name, loaded.model, loaded.options, probe_samples(loaded, question_tokens=[prompt_tokens]))


def with_executor(name: str, model: Any, options: KnobOptions, samples: list[Sample]) -> MeasuredModel:
    """A model under the executor. Every run asks another sample, so that no single one decides."""
    executor = Executor(adapter_for(model), options)

    def answer(knobs: Knobs, run: int, tokens: int) -> object:
        return executor.answer([AnswerRequest(samples[run % len(samples)], knobs)], max_new_tokens=tokens)

    return MeasuredModel(name, model, _grid(options), answer)


def _grid(options: KnobOptions) -> tuple[Knobs, ...]:
    """Every tier at every depth with all experts, and at every top-k with all blocks."""
    full = options.full
    by_depth = [
        Knobs(tier, full.insertion_position, full.top_k, blocks)
        for tier in options.crops
        for blocks in options.block_totals
    ]
    by_top_k = [
        Knobs(tier, full.insertion_position, top_k, full.blocks) for tier in options.crops for top_k in options.top_ks
    ]
    return tuple(dict.fromkeys([*by_depth, *by_top_k]))


def probe_samples(loaded: LoadedModel, *, question_tokens: Sequence[int]) -> list[Sample]:
    """Samples to time: mosaic's own questions; for any other model one question of each length, of noise.

    What an answer costs does not depend on what is in the image or in the words.
    """
    if loaded.name == EMBEDDED:
        return _mosaic_samples()
    source, words = torch.Generator().manual_seed(0), loaded.adapter.text_config.vocab_size
    crops = loaded.adapter.cut(_noise_image(loaded), loaded.options, ImageNormalization((0.5,) * 3, (0.5,) * 3))
    colors = getattr(loaded.model.config.vision_config, "num_channels", 3)
    placed = {tier: pixels[:, :colors].to(default_device(), loaded.model.dtype) for tier, pixels in crops.items()}
    questions = [torch.randint(words, (length,), generator=source).tolist() for length in question_tokens]
    return [Sample(f"noise {nth}", placed, tuple(question)) for nth, question in enumerate(questions)]


def _noise_image(loaded: LoadedModel) -> Image:
    """As large as the finest tier could use."""
    vision = loaded.model.config.vision_config
    side = max([getattr(vision, "image_size", 0) * 4, *(isqrt(count) for count in loaded.options.pixels.values())])
    noise = torch.randint(256, (side, side, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return fromarray(noise.numpy())


def _mosaic_samples() -> list[Sample]:
    from groupwise.workloads.controller.tasks.mosaic.questions import make_question_set
    from groupwise.workloads.controller.tasks.mosaic.scene import HandwritingSplit
    from groupwise.workloads.controller.tasks.mosaic.task import mosaic_sample

    exam = make_question_set(HandwritingSplit.VALIDATION, _MOSAIC_SAMPLES)
    samples = []
    for number in range(_MOSAIC_SAMPLES):
        row = number * exam.questions_per_mosaic + number % exam.questions_per_mosaic
        asked = exam.questions.tokens[row, : exam.questions.lengths[row]].tolist()
        sample = mosaic_sample(exam.mosaics.pixels[number], asked)
        samples.append(
            replace(sample, crops={tier: pixels.to(default_device()) for tier, pixels in sample.crops.items()})
        )
    return samples


def _text_model(name: str, model: Any, prompt_tokens: int) -> MeasuredModel:
    """A model without eyes has no tiers and is not steered: `generate` answers as it is."""
    config = model.config
    source = torch.Generator().manual_seed(0)
    prompt = torch.randint(config.vocab_size, (1, prompt_tokens), generator=source).to(default_device())
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
    """Every setting in turn, round after round, so that a slow spell of the machine meets all of them."""
    require(runs >= 1, "runs", runs, "1 or more")
    require(warm_up >= 0, "warm_up", warm_up, "0 or more")
    require(new_tokens >= 1, "new_tokens", new_tokens, "1 or more")
    meter = LatencyMeter(find_model_parts(subject.model), clock=clock)
    seen: dict[Knobs, list[Timing]] = {knobs: [] for knobs in subject.settings}
    for run in range(warm_up + runs):
        for knobs, timings in seen.items():
            timings.append(meter.time(partial(subject.answer, knobs, run, new_tokens)))
            after_answer()
    return {knobs: summarize(timings[warm_up:]) for knobs, timings in seen.items()}
