"""LatencyMeter: latency of one answer by stage, measured by hooks on a transformers model.

Every millisecond belongs to exactly one stage:

- *vision* is the time inside the vision tower and the projector;
- *prefill* is all other time from the start to the logits of the first token, the caller's own work included;
- *decode* is the rest. Each later call of the head ends one step, so n tokens take n - 1 steps. Without a later call
  there is no decode, and the time after the first logits counts as prefill.

The stages add up to the total, and a skipped block costs nothing. The device is synchronized only where the stage
changes, never between blocks. Any caller is measured alike: `forward`, `generate` or the executor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from groupwise.core.errors import UserError
from groupwise.latency.records import DECODE, PREFILL, STAGES, VISION, Timing

_OTHER_MODALITIES = ("audio", "speech")


@dataclass(frozen=True)
class ModelParts:
    """The modules that an answer passes through, in order. Fill it in by hand for a model of your own."""

    vision: Mapping[str, nn.Module]
    """Vision tower and projector, none inside another; empty for a text model."""
    embedding: nn.Module
    blocks: tuple[nn.Module, ...]
    norm: nn.Module
    head: nn.Module
    """Its first call gives the logits of the first token; every later call ends a decode step."""

    def modules(self) -> Iterator[nn.Module]:
        yield from (*self.vision.values(), self.embedding, *self.blocks, self.norm, self.head)


def find_model_parts(model: Any) -> ModelParts:
    """The parts of any transformers model that generates text, with or without vision; any other is refused."""
    text = model.get_decoder() if hasattr(model, "get_decoder") else nn.Module()
    text_parts = _text_parts(model, text)
    missing = [name for name in ("embedding", "blocks", "norm", "head") if not text_parts.get(name)]
    if missing:
        raise UserError(
            f"The latency of {type(model).__name__} cannot be measured: it has no {' or '.join(missing)} that could be"
            " found. Take a model that generates text, such as LlamaForCausalLM or LlavaForConditionalGeneration, or"
            " name its modules yourself with groupwise.latency.meter.ModelParts."
        )
    return ModelParts(vision=_vision_parts(model, text), **text_parts)


def _text_parts(model: Any, text: nn.Module) -> dict[str, Any]:
    """Blocks are the longest ModuleList right below the text model; embedding and norm are its siblings."""
    embeddings = [child for child in text.children() if isinstance(child, nn.Embedding)]
    lists = [list(child) for child in text.children() if isinstance(child, nn.ModuleList)]
    blocks: list[nn.Module] = max(lists, key=len, default=[])
    norms = [child for child in text.children() if "Norm" in type(child).__name__]
    return {
        "embedding": embeddings[0] if embeddings else None,
        "blocks": tuple(blocks),
        "norm": norms[-1] if norms else None,
        "head": getattr(model, "get_output_embeddings", lambda: None)(),
    }


def _vision_parts(model: Any, text: nn.Module) -> dict[str, nn.Module]:
    """The siblings of the text model, where the model's config has vision."""
    if getattr(model.config, "vision_config", None) is None:
        return {}
    parent = next(module for module in model.modules() if any(child is text for child in module.children()))
    return {
        name: child
        for name, child in parent.named_children()
        if child is not text
        and child is not model.get_output_embeddings()
        and not isinstance(child, nn.Embedding)
        and not any(modality in name for modality in _OTHER_MODALITIES)
    }


class LatencyMeter:
    """Measures calls of a model, one answer at a time. The model has hooks only during a measurement."""

    def __init__(
        self,
        parts: ModelParts,
        device: torch.device | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.parts, self._clock = parts, clock
        self._devices = _accelerators(parts) if device is None else {device} - {torch.device("cpu")}

    def time(self, answer: Callable[[], object]) -> Timing:
        """Call `answer` once and measure it by stage."""
        with self._hooked() as stage_clock:
            started = time.thread_time()
            answer()
            cpu_ms = None if self._devices else 1000 * (time.thread_time() - started)
            return replace(stage_clock.finish(), cpu_ms=cpu_ms)

    def _now_ms(self) -> float:
        for device in self._devices:
            torch.accelerator.synchronize(device)
        return self._clock() * 1000

    @contextmanager
    def _hooked(self) -> Iterator[_StageClock]:
        """Hooks are removed again, after an error too."""
        stage_clock = _StageClock(self._now_ms)
        with ExitStack() as hooks:
            for module in self.parts.vision.values():
                start = module.register_forward_pre_hook(lambda *_: stage_clock.on_vision_start())
                end = module.register_forward_hook(lambda *_: stage_clock.on_vision_end())
                hooks.callback(start.remove)
                hooks.callback(end.remove)
            logits = self.parts.head.register_forward_hook(lambda *_: stage_clock.on_logits())
            hooks.callback(logits.remove)
            stage_clock.start()
            yield stage_clock


class _StageClock:
    """Attributes the time since the last event to a stage."""

    def __init__(self, now_ms: Callable[[], float]):
        self._now_ms = now_ms
        self._stages_ms = dict.fromkeys(STAGES, 0.0)
        self._logits_at_ms: list[float] = []

    def start(self) -> None:
        self._start_ms = self._last_ms = self._now_ms()

    def on_vision_start(self) -> None:
        self._attribute_to(self._text_stage)

    def on_vision_end(self) -> None:
        self._attribute_to(VISION)

    def on_logits(self) -> None:
        self._attribute_to(self._text_stage)
        self._logits_at_ms.append(self._last_ms)

    def finish(self) -> Timing:
        self._attribute_to(DECODE if len(self._logits_at_ms) > 1 else PREFILL)
        decode_steps_ms = tuple(
            after - before for before, after in zip(self._logits_at_ms, self._logits_at_ms[1:], strict=False)
        )
        return Timing(self._stages_ms, self._last_ms - self._start_ms, decode_steps_ms)

    @property
    def _text_stage(self) -> str:
        return DECODE if self._logits_at_ms else PREFILL

    def _attribute_to(self, stage: str) -> None:
        now_ms = self._now_ms()
        self._stages_ms[stage] += now_ms - self._last_ms
        self._last_ms = now_ms


def _accelerators(parts: ModelParts) -> set[torch.device]:
    """The devices to synchronize; the CPU's work is done when a call returns."""
    devices = {weight.device for module in parts.modules() for weight in module.parameters()}
    return {device for device in devices if device.type not in ("cpu", "meta")}
