"""Memory of training a controller of a frozen multimodal model: vision, prefix states, cache, policy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupwise.core.errors import UserError
from groupwise.memory.architecture import Architecture, architecture
from groupwise.memory.stages import StageBytes, StepSpec, WeightBytes, drop_zero, peak_of_update

ENCODED, FIRST, SECOND, FREQUENCIES = 256, 256, 128, 16
"""Widths of the controller's network."""


@dataclass(frozen=True)
class VisionTower:
    """A vision tower that sees crops of one size, and a projector of two layers."""

    width: int
    layers: int
    inner: int
    patches: int
    """Tokens that one crop becomes."""
    patch_numbers: int
    """Numbers of one patch of pixels."""
    text_width: int

    @property
    def parameters(self) -> int:
        wide = self.width
        block = 4 * (wide * wide + wide) + 2 * wide * self.inner + self.inner + wide + 4 * wide
        ends = self.patch_numbers * wide + wide + self.patches * wide + 2 * wide
        projector = wide * self.text_width + self.text_width + self.text_width * self.text_width + self.text_width
        return self.layers * block + ends + projector


@dataclass(frozen=True)
class ControllerMemory:
    """A frozen model whose answers are computed while a small policy learns its knobs."""

    text: Architecture
    vision: VisionTower
    crops: Mapping[str, int]
    """Crops of every tier, the overview among them."""
    positions: int
    """Blocks before the last insertion position: computed for all tiers of a question."""
    question_tokens: int
    options: tuple[int, int, int, int] = (3, 5, 5, 5)
    """Tiers, insertion positions, top-ks, totals of blocks."""
    number_bytes: int = 4
    new_tokens: int = 1

    def prompt_tokens(self, crops: int) -> int:
        return crops * self.vision.patches + self.question_tokens

    @property
    def policy_numbers(self) -> int:
        """The controller's network, exactly."""
        tiers, positions, top_ks, totals = self.options
        heads = sum((wide + 1) * count for wide, count in _heads(tiers, positions, top_ks, totals))
        encoder = 2 * FREQUENCIES * ENCODED + ENCODED + ENCODED * ENCODED + ENCODED
        first = (self.text.width + 1) * FIRST + (ENCODED + 1) * FIRST + (2 * FIRST + 1) * FIRST
        second = (self.text.width + 1) * SECOND + (ENCODED + 1) * SECOND + positions * SECOND + (SECOND + 1) * SECOND
        return encoder + first + second + heads

    def stages(self, job: StepSpec) -> StageBytes:
        policy = WeightBytes(0, self.policy_numbers)
        held = policy.parts(job)
        frozen = (self.text.parameters + self.vision.parameters) * self.number_bytes
        held = {"frozen model": frozen} | held
        rollout = {name: held[name] for name in ("frozen model", "weights", "optimizer", "averaged weights")}
        rows = job.shape.largest_pass
        shared = job.prompts_in(rows) * (4 * ENCODED + 6 * FIRST + self.text.width)
        learned = {"activations": (shared + rows * (6 * SECOND + self.text.width)) * 4}
        if job.shape.passes > 1:  # of one layer, before it is added to those of earlier passes
            learned["gradient of a layer"] = FIRST * max(2 * FIRST, self.text.width) * 4
        update = peak_of_update(held, [learned], policy.in_step(job), one_pass=job.shape.passes == 1)
        return StageBytes(drop_zero({**rollout, **self._rollout(job)}), drop_zero(update))

    def _rollout(self, job: StepSpec) -> dict[str, int]:
        """Every question of a pass is new, all rows look as finely as they can, and no two go on alike from their
        insertion positions, which are spread evenly: nothing is remembered or shared beyond the prefix.
        """
        rows, text, number = job.shape.largest_pass, self.text, self.number_bytes
        questions = job.prompts_in(rows)
        per_block = text.width + 2 * text.kv_width  # the state after it, keys and values
        every_tier = sum(map(self.prompt_tokens, self.crops.values()))
        longest = self.prompt_tokens(max(self.crops.values()))
        prefix = questions * every_tier * (self.positions * per_block + text.width) * number
        own_blocks = text.layers - (self.positions + 1) / 2
        more = self.new_tokens - 1
        kept_width = text.width + (own_blocks * 2 * text.kv_width if more else 0)  # keys and values for tokens to come
        cache = int(rows * longest * kept_width) * number
        one_block = int(rows * longest * (self._wide_moment(rows / questions) + per_block)) * number
        seen = sum(self.crops.values()) - len(self.crops) + 1  # the overview once
        vision = seen * self.vision.patches * (5 * self.vision.width + 2 * self.vision.inner) * number
        decoding = text.kv_bytes(rows * (longest + more), number) if more else 0  # a copy with room for new tokens
        moment = max(
            {"activations": max(one_block, vision)}, {"decoding": decoding}, key=lambda parts: sum(parts.values())
        )
        return {
            "prefix states": prefix,
            "KV cache and states": cache,
            **moment,
            "logits": rows * text.vocabulary * number,
        }

    def _wide_moment(self, members: float) -> float:
        """Numbers of a token inside the feed-forward part or its experts."""
        text = self.text
        times = self._mean_top_k(members) if text.experts else 1
        return times * max(4 * text.inner, 3 * text.inner + text.width) + 2 * text.width

    def _mean_top_k(self, members: float) -> float:
        """Of a question's rows, if no two go on alike: at full top-k all positions would be the same way."""
        _, positions, top_ks, _ = self.options
        fewer = [self.text.top_k - less for less in range(1, top_ks) for _ in range(positions)]
        taken = fewer[: max(1, round(members))] or [self.text.top_k]
        return sum(taken) / len(taken)

    def smaller(self) -> list[tuple[str, ControllerMemory, bool]]:
        found: list[tuple[str, ControllerMemory, bool]] = []
        now = self
        if now.number_bytes > 2:
            now = replace(now, number_bytes=2)
            found.append(("dtype bfloat16 of the frozen model", now, True))
        if len(now.crops) > 1:
            fewer = dict(sorted(now.crops.items(), key=lambda pair: pair[1])[:-1])
            now = replace(now, crops=fewer)
            found.append(("no finest tier of crops", now, True))
        return found


def _heads(tiers: int, positions: int, top_ks: int, totals: int) -> list[tuple[int, int]]:
    """(width, options) of each head that has a choice."""
    every = [(FIRST, tiers), (FIRST, positions), (SECOND, top_ks), (SECOND, totals)]
    return [(wide, count) for wide, count in every if count > 1]


def read_frozen(folder: Path) -> tuple[Architecture, VisionTower]:
    """Text and vision of a LLaVA model by its config.json."""
    file = folder / "config.json"
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as a model's config.json ({error}). Check the path.") from error
    if content.get("model_type") != "llava":
        raise UserError(
            f"{file} has model_type '{content.get('model_type')}': the arithmetic knows llava. `groupwise plan RECIPE"
            " --probe` runs a real step instead."
        )
    text = architecture(content["text_config"], f"text_config of {file}")
    return text, vision_of(content["vision_config"], text.width)


def vision_of(content: Mapping[str, Any], text_width: int) -> VisionTower:
    patch, side = int(content["patch_size"]), int(content["image_size"])
    return VisionTower(
        width=int(content["hidden_size"]),
        layers=int(content["num_hidden_layers"]),
        inner=int(content["intermediate_size"]),
        patches=(side // patch) ** 2,
        patch_numbers=int(content.get("num_channels", 3)) * patch * patch,
        text_width=text_width,
    )
