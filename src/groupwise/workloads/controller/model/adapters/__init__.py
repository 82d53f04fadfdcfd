"""What the executor needs of a model: prompts as embeddings, blocks, and a head. One small class per family."""

from __future__ import annotations

from typing import Any

from groupwise.core.errors import UserError
from groupwise.workloads.controller.model.adapters.base import (
    Encoded,
    ModelAdapter,
    Prompt,
    Sample,
    default_drop_order,
    default_options,
    dense_blocks,
    full_top_k,
    image_side,
)
from groupwise.workloads.controller.model.adapters.llava import InternVLAdapter, LlavaAdapter, LlavaNextAdapter
from groupwise.workloads.controller.model.adapters.molmoe import MolmoeAdapter
from groupwise.workloads.controller.model.adapters.qwen import QwenAdapter

FAMILIES: dict[str, type[LlavaAdapter] | type[MolmoeAdapter] | type[QwenAdapter]] = {
    "InternVLForConditionalGeneration": InternVLAdapter,
    "LlavaForConditionalGeneration": LlavaAdapter,
    "LlavaNextForConditionalGeneration": LlavaNextAdapter,
    "MolmoeForConditionalGeneration": MolmoeAdapter,
    "Qwen2VLForConditionalGeneration": QwenAdapter,
    "Qwen2_5_VLForConditionalGeneration": QwenAdapter,
    "Qwen3VLForConditionalGeneration": QwenAdapter,
    "Qwen3VLMoeForConditionalGeneration": QwenAdapter,
}


def adapter_for(model: Any) -> ModelAdapter:
    """The adapter of the model's family; a model without a vision tower or of an unknown family is refused."""
    name = type(model).__name__
    check_family(name, getattr(model, "config", None))
    return FAMILIES[name](model)


def check_family(name: str, config: Any) -> None:
    """Refuse a model that has no adapter, by its class and its configuration."""
    if name in FAMILIES:
        return
    if config is not None and not hasattr(config, "vision_config"):
        raise UserError(
            f"{name} has no vision tower, so it cannot offer the tier knob. Take a model of {', '.join(FAMILIES)}."
        )
    raise UserError(
        f"{name} has no adapter, so its knobs cannot be controlled: there are adapters for {', '.join(FAMILIES)}. Write"
        " one as in groupwise/workloads/controller/model/adapters/llava.py."
    )


__all__ = [
    "FAMILIES",
    "Encoded",
    "InternVLAdapter",
    "LlavaAdapter",
    "LlavaNextAdapter",
    "ModelAdapter",
    "MolmoeAdapter",
    "Prompt",
    "QwenAdapter",
    "Sample",
    "adapter_for",
    "check_family",
    "default_drop_order",
    "default_options",
    "dense_blocks",
    "full_top_k",
    "image_side",
]
