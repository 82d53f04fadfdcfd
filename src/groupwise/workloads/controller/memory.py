"""Memory of training a controller of a frozen multimodal model, by arithmetic. No torch.

Counted are the frozen model, vision, the prefix states of all crop tiers, the KV cache and the controller's network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupwise.core.errors import UserError
from groupwise.memory.architecture import Architecture, architecture, read_model_config
from groupwise.memory.plan import Reduction
from groupwise.memory.stages import PassPeaks, StageBytes, StepSpec, WeightBytes
from groupwise.workloads.controller.config import (
    BUDGET_DIM,
    NUM_FREQUENCIES,
    OVERVIEW_PIXELS,
    STAGE_ONE_DIM,
    STAGE_TWO_DIM,
)
from groupwise.workloads.controller.model.molmoe.sizes import (
    CROP_SIDE,
    PATCH_SIDE,
    MolmoeSizes,
    image_token_count,
    is_molmo,
    read_sizes,
)

_PAIR_BYTES = 64
"""Of a token and one of its experts, besides their products: seven indices of 8 bytes, the weight, the sorted copy."""


@dataclass(frozen=True)
class VisionTower:
    """A vision tower for crops of one size, and a projector of two layers."""

    width: int
    layers: int
    ffn_dim: int
    patches: int
    """Tokens of one crop."""
    patch_pixels: int
    """Numbers of one patch: channels x side x side."""
    text_width: int

    def image_tokens(self, crops: int) -> int:
        return crops * self.patches

    @property
    def activations(self) -> int:
        """Numbers per crop at the peak of a block."""
        return self.patches * (5 * self.width + 2 * self.ffn_dim)

    @property
    def parameters(self) -> int:
        """All of them, exactly."""
        width, text = self.width, self.text_width
        block = 4 * (width * width + width) + 2 * width * self.ffn_dim + self.ffn_dim + width + 4 * width
        embeddings_and_norm = self.patch_pixels * width + width + self.patches * width + 2 * width
        projector = width * text + text + text * text + text
        return self.layers * block + embeddings_and_norm + projector


@dataclass(frozen=True)
class MolmoeVision:
    """MolmoE's vision tower and connector: overlapping tiles, whose number is an upper limit."""

    sizes: MolmoeSizes

    def image_tokens(self, crops: int) -> int:
        """Of the longest tiling, which has all tiles below each other."""
        return image_token_count(crops - 1, 1)

    @property
    def activations(self) -> int:
        """Numbers per crop at the peak of a block, while the features of earlier blocks are kept; and its pixels."""
        vision, tokens = self.sizes.vision, 1 + (CROP_SIDE // PATCH_SIDE) ** 2
        return tokens * (5 * vision.width + 2 * vision.ffn_dim + vision.feature_width) + 3 * CROP_SIDE**2

    @property
    def parameters(self) -> int:
        parts = self.sizes.parameters_by_part()
        return parts["vision tower"] + parts["connector"]


@dataclass(frozen=True)
class ControllerMemory:
    """A frozen model that answers while a small policy learns to choose its knobs."""

    text: Architecture
    vision: VisionTower | MolmoeVision
    crops: Mapping[str, int]
    """Crops of every tier, the overview included."""
    positions: int
    """Blocks before the last insertion position: computed for all tiers of a question."""
    question_tokens: int
    options: tuple[int, int, int, int] = (3, 5, 5, 5)
    """How many tiers, insertion positions, top-ks and totals of blocks there are to choose from."""
    sees_overview: bool = True
    """Whether stage one looks at the overview."""
    dtype_bytes: int = 4
    new_tokens: int = 1

    def prompt_tokens(self, crops: int) -> int:
        return self.vision.image_tokens(crops) + self.question_tokens

    @property
    def frozen_params(self) -> dict[str, int]:
        """Parameters of the frozen model; by part where it is one whose parts have names."""
        if isinstance(self.vision, MolmoeVision):
            return self.vision.sizes.parameters_by_part()
        return {"frozen model": self.text.parameters + self.vision.parameters}

    @property
    def policy_params(self) -> int:
        """Parameters of the controller's network, exactly."""
        positions = self.options[1]
        widths = (STAGE_ONE_DIM, STAGE_ONE_DIM, STAGE_TWO_DIM, STAGE_TWO_DIM)
        heads = sum((width + 1) * count for width, count in zip(widths, self.options, strict=True) if count > 1)
        encoder = _linear(2 * NUM_FREQUENCIES, BUDGET_DIM) + _linear(BUDGET_DIM, BUDGET_DIM)
        inputs_one = _linear(self.text.width, STAGE_ONE_DIM) + _linear(BUDGET_DIM, STAGE_ONE_DIM)
        if self.sees_overview:
            inputs_one += OVERVIEW_PIXELS * STAGE_ONE_DIM
        inputs_two = _linear(self.text.width, STAGE_TWO_DIM) + _linear(BUDGET_DIM, STAGE_TWO_DIM)
        stage_one = inputs_one + _linear(2 * STAGE_ONE_DIM, STAGE_ONE_DIM)
        stage_two = inputs_two + positions * STAGE_TWO_DIM + _linear(STAGE_TWO_DIM, STAGE_TWO_DIM)
        return encoder + stage_one + stage_two + heads

    def predict(self, spec: StepSpec) -> StageBytes:
        """Only the policy can be sharded: the frozen model runs to another depth on each rank, so it stays whole."""
        policy = WeightBytes(0, self.policy_params)
        frozen = {part: count * self.dtype_bytes for part, count in self.frozen_params.items()}
        persistent = frozen | policy.by_part(spec)
        update = PassPeaks([self._update_peak(spec)], one_backward=spec.shape.passes == 1)
        return policy.stage_bytes(spec, persistent, self._rollout_peaks(spec), update)

    def _update_peak(self, spec: StepSpec) -> dict[str, int]:
        rows, text = spec.shape.largest_pass, self.text
        per_question = 4 * BUDGET_DIM + 6 * STAGE_ONE_DIM + text.width
        per_row = 6 * STAGE_TWO_DIM + text.width
        parts = {"activations": (spec.conditions_in(rows) * per_question + rows * per_row) * 4}
        if spec.shape.passes > 1:  # of one layer, before it is added to those of earlier passes
            parts["gradient of a layer"] = STAGE_ONE_DIM * max(2 * STAGE_ONE_DIM, text.width) * 4
        return parts

    def _rollout_peaks(self, spec: StepSpec) -> list[dict[str, int]]:
        """In the worst case: every question of a pass is new, all rows take the finest tier, and no two rows of a
        question share a path behind their insertion positions, which are spread evenly. So nothing is cached or shared
        beyond the prefix.
        """
        rows, text, number = spec.shape.largest_pass, self.text, self.dtype_bytes
        questions = spec.conditions_in(rows)
        state_and_kv = text.width + 2 * text.kv_width
        tokens_of_all_tiers = sum(map(self.prompt_tokens, self.crops.values()))
        longest = self.prompt_tokens(max(self.crops.values()))
        prefix = questions * tokens_of_all_tiers * (self.positions * state_and_kv + text.width) * number
        blocks_after_prefix = text.layers - (self.positions + 1) / 2
        later_tokens = self.new_tokens - 1
        kept_width = text.width + (blocks_after_prefix * 2 * text.kv_width if later_tokens else 0)
        always = {
            "prefix states": prefix,
            "KV cache and states": int(rows * longest * kept_width) * number,
            "logits": rows * text.vocabulary * number,
        }
        held = (
            text.width if text.experts and not later_tokens else state_and_kv
        )  # keys and values only for later tokens
        per_token = (self._ffn_peak(rows / questions) + held) * number
        if text.experts:
            per_token += _PAIR_BYTES * self._mean_top_k(rows / questions)
        block = int(rows * longest * per_token)
        encoded_crops = sum(self.crops.values()) - len(self.crops) + 1  # the overview once
        vision = encoded_crops * self.vision.activations * number
        # decoding copies the cache, with room for new tokens
        decoding = text.kv_bytes(rows * (longest + later_tokens), number) if later_tokens else 0
        return [{**always, "activations": max(block, vision)}, {**always, "decoding": decoding}]

    def _ffn_peak(self, rows_per_question: float) -> float:
        """Numbers per token at the peak of the feed-forward part or its experts."""
        text = self.text
        experts = self._mean_top_k(rows_per_question) if text.experts else 1
        if not text.experts:
            return max(4 * text.ffn_dim, 3 * text.ffn_dim + text.width) + 2 * text.width
        # inputs and outputs of the first product, or its outputs and what is made of them
        return experts * (2 * text.ffn_dim + max(text.ffn_dim, text.width)) + 2 * text.width

    def _mean_top_k(self, rows_per_question: float) -> float:
        """Over a question's rows, if no two share a path: at full top-k all insertion positions give the same path."""
        _, positions, top_ks, _ = self.options
        below_full = [self.text.top_k - less for less in range(1, top_ks) for _ in range(positions)]
        top_k_of_rows = below_full[: max(1, round(rows_per_question))] or [self.text.top_k]
        return sum(top_k_of_rows) / len(top_k_of_rows)

    def reductions(self) -> list[Reduction]:
        reductions: list[Reduction] = []
        memory = self
        if memory.dtype_bytes > 2:
            memory = replace(memory, dtype_bytes=2)
            reductions.append(Reduction("dtype", "bfloat16", memory, effect="of the frozen model", changes_result=True))
        if len(memory.crops) > 1:
            fewer = dict(sorted(memory.crops.items(), key=lambda tier: tier[1])[:-1])
            memory = replace(memory, crops=fewer)
            reductions.append(Reduction("crops", "without the finest tier", memory, changes_result=True))
        return reductions


def read_controlled_model(folder: Path) -> tuple[Architecture, VisionTower | MolmoeVision]:
    """Text model and vision tower of a LLaVA model or of MolmoE, from its config.json."""
    file = folder / "config.json"
    content = read_model_config(file)
    return _molmoe(content, str(file)) if is_molmo(content) else read_llava(folder)


def read_llava(folder: Path) -> tuple[Architecture, VisionTower]:
    """Text model and vision tower of a LLaVA model, from its config.json."""
    file = folder / "config.json"
    content = read_model_config(file)
    if content.get("model_type") != "llava":
        raise UserError(
            f"{file} has model_type '{content.get('model_type')}': the plan knows llava and MolmoE. `groupwise plan"
            " RECIPE --probe` measures a real step instead."
        )
    text = architecture(content["text_config"], f"text_config of {file}")
    return text, vision_tower(content["vision_config"], text.width)


def _molmoe(content: Mapping[str, Any], source: str) -> tuple[Architecture, MolmoeVision]:
    sizes = read_sizes(content, source)
    text = Architecture(
        model_type="olmoe",
        width=sizes.width,
        layers=sizes.blocks,
        heads=sizes.heads,
        kv_heads=sizes.heads,
        head_dim=sizes.width // sizes.heads,
        ffn_dim=sizes.expert_width,
        vocabulary=sizes.head_rows,
        experts=sizes.experts,
        top_k=sizes.top_k,
        max_positions=sizes.max_tokens,
    )
    return text, MolmoeVision(sizes)


def vision_tower(content: Mapping[str, Any], text_width: int) -> VisionTower:
    """From the vision_config of a config.json."""
    patch, side = int(content["patch_size"]), int(content["image_size"])
    return VisionTower(
        width=int(content["hidden_size"]),
        layers=int(content["num_hidden_layers"]),
        ffn_dim=int(content["intermediate_size"]),
        patches=(side // patch) ** 2,
        patch_pixels=int(content.get("num_channels", 3)) * patch * patch,
        text_width=text_width,
    )


def _linear(inputs: int, outputs: int) -> int:
    return (inputs + 1) * outputs
