"""One answer's time by stage, read off by hooks on the model that gives it.

Every millisecond belongs to exactly one stage, and hooks are where it changes hands:

- *vision* is the time inside the vision tower and the projector;
- *prefill* is all else from the start to the first token's scores: embedding, block 0 and its followers, norm, head,
  and what the caller does around them;
- *decode* is the rest. Each later call of the head ends one step, so n tokens take n - 1. With no later call there is
  no decode: what follows the first scores is prefill then.

So the stages cover the whole, and a block that is not called costs nothing. The device is waited for only where time
changes hands, never from block to block. It does not matter who calls the parts: `forward`, `generate` or the executor.
The parts of a transformers model that a clock can be hung on.
Where a step's time goes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from groupwise.core.errors import UserError, require
from groupwise.latency.records import DECODE, PREFILL, STAGES, VISION, LatencySummary, Timing, summarize

_OTHER_MODALITIES = ("audio", "speech")


@dataclass(frozen=True)
class ModelParts:
    """What an answer passes through, in order. For a model of one's own, fill it in by hand."""

    vision: Mapping[str, nn.Module]
    """Tower and projector, none inside another; empty for a model of text alone."""
    embedding: nn.Module
    blocks: tuple[nn.Module, ...]
    norm: nn.Module
    head: nn.Module
    """Its first call gives the first token's scores; every later one ends a decode step."""

    def named(self) -> Iterator[tuple[str, nn.Module]]:
        yield from self.vision.items()
        yield "embedding", self.embedding
        yield from ((f"block {nth}", block) for nth, block in enumerate(self.blocks))
        yield "norm", self.norm
        yield "head", self.head


def find_model_parts(model: Any) -> ModelParts:
    """The parts of any transformers model that writes text, with or without eyes; any other is refused by name."""
    text = model.get_decoder() if hasattr(model, "get_decoder") else nn.Module()
    found = _text_parts(model, text)
    missing = [name for name in ("embedding", "blocks", "norm", "head") if not found.get(name)]
    if missing:
        raise UserError(
            f"{type(model).__name__} cannot be metered as it is: no {' or '.join(missing)} found in it. Take a model"
            " that writes text, such as LlamaForCausalLM or LlavaForConditionalGeneration, or name its parts yourself"
            " with groupwise.meter.parts.Parts."
        )
    return ModelParts(vision=_vision_parts(model, text), **found)


def _text_parts(model: Any, text: nn.Module) -> dict[str, Any]:
    """Blocks are the longest list of modules right below the text model; embedding and norm stand beside it."""
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
    """What stands beside the text model in a model that has been configured with vision."""
    if getattr(model.config, "vision_config", None) is None:
        return {}
    whole = next(module for module in model.modules() if any(child is text for child in module.children()))
    return {
        name: child
        for name, child in whole.named_children()
        if child is not text
        and child is not model.get_output_embeddings()
        and not isinstance(child, nn.Embedding)
        and not any(sense in name for sense in _OTHER_MODALITIES)
    }


__all__ = ["LatencyMeter", "ModelParts", "Timing", "find_model_parts"]


class LatencyMeter:
    """Times what is done with a model, one answer at a time. Between two calls the model carries no hooks.

    `detail` also times every part by itself, blocks one by one. It waits for the device at each of them, so its totals
    are not to be compared with those of a meter without it.
    """

    def __init__(
        self,
        parts: ModelParts,
        device: torch.device | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        detail: bool = False,
    ):
        self.parts, self._clock, self._detail = parts, clock, detail
        self._devices = _accelerators(parts) if device is None else {device} - {torch.device("cpu")}

    def time(self, act: Callable[[], object]) -> Timing:
        """Do it once, and tell where the time went."""
        with self._watched() as watch:
            act()
            return watch.finish()

    def repeat(self, act: Callable[[], object], *, warm_up: int = 3, runs: int = 20) -> LatencySummary:
        """Do it often, and summarize all but the warm-up."""
        require(runs >= 1, "runs", runs, "1 or more")
        require(warm_up >= 0, "warm_up", warm_up, "0 or more")
        timings = [self.time(act) for _ in range(warm_up + runs)]
        return summarize(timings[warm_up:])

    def _now_ms(self) -> float:
        for device in self._devices:
            torch.accelerator.synchronize(device)
        return self._clock() * 1000

    @contextmanager
    def _watched(self) -> Iterator[_StageClock]:
        """Hooks on, and off again whatever happens."""
        watch = _StageClock(self._now_ms)
        with ExitStack() as hooks:
            if self._detail:
                for name, module in self.parts.named():
                    _hook(hooks, module, before=watch.entering(name), after=watch.leaving(name))
            for module in self.parts.vision.values():
                _hook(hooks, module, before=watch.vision_begins, after=watch.vision_ends)
            _hook(hooks, self.parts.head, after=watch.scores_are_there)
            watch.begin()
            yield watch


class _StageClock:
    """Hands the time since the last event to a stage."""

    def __init__(self, now_ms: Callable[[], float]):
        self._now_ms = now_ms
        self._stages_ms = dict.fromkeys(STAGES, 0.0)
        self._scores_at: list[float] = []
        self._parts_ms: dict[str, float] = {}
        self._entered: dict[str, float] = {}

    def begin(self) -> None:
        self._begun = self._last = self._now_ms()

    def vision_begins(self) -> None:
        self._hand_to(self._text_stage)

    def vision_ends(self) -> None:
        self._hand_to(VISION)

    def scores_are_there(self) -> None:
        self._hand_to(self._text_stage)
        self._scores_at.append(self._last)

    def finish(self) -> Timing:
        self._hand_to(DECODE if len(self._scores_at) > 1 else PREFILL)
        steps = tuple(after - before for before, after in zip(self._scores_at, self._scores_at[1:], strict=False))
        return Timing(self._stages_ms, self._last - self._begun, steps, self._parts_ms)

    def entering(self, name: str) -> Callable[[], None]:
        def note() -> None:
            self._entered[name] = self._now_ms()

        return note

    def leaving(self, name: str) -> Callable[[], None]:
        def note() -> None:
            self._parts_ms[name] = self._parts_ms.get(name, 0.0) + self._now_ms() - self._entered[name]

        return note

    @property
    def _text_stage(self) -> str:
        return DECODE if self._scores_at else PREFILL

    def _hand_to(self, stage: str) -> None:
        now = self._now_ms()
        self._stages_ms[stage] += now - self._last
        self._last = now


def _hook(
    hooks: ExitStack, module: nn.Module, *, before: Callable[[], None] | None = None, after: Callable[[], None]
) -> None:
    if before is not None:
        noted = before
        hooks.callback(module.register_forward_pre_hook(lambda *_: noted()).remove)
    hooks.callback(module.register_forward_hook(lambda *_: after()).remove)


def _accelerators(parts: ModelParts) -> set[torch.device]:
    """The devices whose work must be waited for; the CPU's is done when a call returns."""
    devices = {weight.device for _, module in parts.named() for weight in module.parameters()}
    return {device for device in devices if device.type not in ("cpu", "meta")}


class StageTimer:
    """Seconds per named stage, measured with the device's work finished."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """What has passed since the last lap belongs to this stage."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now
