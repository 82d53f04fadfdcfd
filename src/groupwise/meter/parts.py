"""The parts of a transformers model that a clock can be hung on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from groupwise.core.errors import UserError

_OTHER_SENSES = ("audio", "speech")


@dataclass(frozen=True)
class Parts:
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


def find_parts(model: Any) -> Parts:
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
    return Parts(vision=_vision_parts(model, text), **found)


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
        and not any(sense in name for sense in _OTHER_SENSES)
    }
