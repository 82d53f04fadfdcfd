"""Which models can share a prompt within a group: told by their configuration, then checked by a small computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.workloads.chat.engine.attention import ATTENTION_NAME, Layout
from groupwise.workloads.chat.engine.llama_forward import llama_forward
from groupwise.workloads.chat.engine.packing import pack_batch

HiddenStatesFn = Callable[[Tensor, Tensor, Layout], Tensor]
"""Hidden states [predicting tokens, width], from ids and positions [batch, tokens] and who sees whom."""

_PROMPTS = ((3, 1, 4), (2, 5))
_COMPLETIONS = (((9, 2), (6,)), ((5, 3, 7),))
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference of hidden states, relative to the largest of them."""


def shared_prefix_forward(causal_lm: Any) -> HiddenStatesFn | str:
    """Set the model up to share prompts; returns how to compute it. Where it cannot, leave it as it is and say why."""
    reason = _unsupported_reason(causal_lm)
    if reason is not None:
        return reason
    stock = causal_lm.config._attn_implementation
    plain = _reference_outputs(causal_lm)
    causal_lm.set_attn_implementation(ATTENTION_NAME)
    forward: HiddenStatesFn = StockForward(causal_lm.base_model)
    try:
        shared, heads = _shared_outputs(causal_lm, forward)
    except (TypeError, RuntimeError, AttributeError, KeyError) as fault:
        causal_lm.set_attn_implementation(stock)
        return f"its layers do not hand a layout on to their attention ({type(fault).__name__}: {fault})"
    for name, together, apart in (("hidden states", shared, plain[0]), ("logits", heads, plain[1])):
        if not _close(together, apart):
            causal_lm.set_attn_implementation(stock)
            return f"its {name} come out differently when a prompt is shared"
    return _lean_if_equal(causal_lm, plain[0]) or forward


def _lean_if_equal(causal_lm: Any, plain: Tensor) -> HiddenStatesFn | None:
    lean = llama_forward(causal_lm.base_model)
    if lean is None:
        return None
    try:
        shared, _ = _shared_outputs(causal_lm, lean)
    except (TypeError, RuntimeError, AttributeError, IndexError):  # of Llama's build by its names only
        return None
    return lean if _close(shared, plain) else None


class StockForward:
    """The model's own forward, told who sees whom."""

    def __init__(self, base_model: Any):
        self.model = base_model

    def __call__(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        hidden: Tensor = self.model(input_ids=ids, position_ids=positions, use_cache=False, layout=layout)[0]
        hidden, wanted = hidden.flatten(0, 1), layout.predicting
        return hidden if wanted is None else hidden.index_select(0, wanted)


def _close(together: Tensor, apart: Tensor) -> bool:
    return together.shape == apart.shape and _relative_error(together, apart) <= _TOLERANCE[apart.dtype]


def _relative_error(together: Tensor, apart: Tensor) -> float:
    """Largest difference relative to the largest number. In half precision that of the middle token: a router
    of experts may tip over for some by rounding alone.
    """
    by_token = (together - apart).abs().amax(-1) / apart.abs().max()
    exact = apart.dtype in (torch.float32, torch.float64)
    return float(by_token.max() if exact else by_token.median())


def _unsupported_reason(causal_lm: Any) -> str | None:
    config = causal_lm.config.get_text_config()
    others = sorted({*(getattr(config, "layer_types", None) or ())} - {"full_attention"})
    windows = getattr(config, "sliding_window", None) if not getattr(config, "layer_types", None) else None
    if not getattr(causal_lm, "_supports_attention_backend", False):
        return "transformers gives it no choice of attention functions"
    if others:
        return f"it has layers of {', '.join(others)}, whose cache is not plain keys and values"
    if windows is not None:
        return f"it attends within a sliding window of {windows} tokens"
    if type(causal_lm.get_output_embeddings()) is not nn.Linear:
        return f"its head is {type(causal_lm.get_output_embeddings()).__name__}, not a plain linear layer"
    return None


@torch.no_grad()
def _reference_outputs(causal_lm: Any) -> tuple[Tensor, Tensor]:
    """Hidden states and logits of completions, each run after its own prompt."""
    hidden, logits = [], []
    for prompt, group in zip(_PROMPTS, _COMPLETIONS, strict=True):
        for completion in group:
            ids = torch.tensor([[*prompt, *completion]], device=causal_lm.device)
            hidden.append(causal_lm.base_model(input_ids=ids, use_cache=False)[0][0, len(prompt) :])
            logits.append(causal_lm(input_ids=ids, use_cache=False).logits[0, len(prompt) :])
    return torch.cat(hidden), torch.cat(logits)


@torch.no_grad()
def _shared_outputs(causal_lm: Any, forward: HiddenStatesFn) -> tuple[Tensor, Tensor]:
    """The same by the shared path."""
    packed = pack_batch(_PROMPTS, _COMPLETIONS, causal_lm.device)
    hidden = forward(packed.ids[None], packed.positions[None], packed)[len(_PROMPTS) :]
    return hidden, causal_lm.get_output_embeddings()(hidden)
