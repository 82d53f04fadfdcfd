"""Which forward a model gets: shared-prefix where its outputs prove equal, else the plain one with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.workloads.chat.engine.attention import ATTENTION_NAME, AttentionLayout
from groupwise.workloads.chat.engine.llama_forward import llama_forward
from groupwise.workloads.chat.engine.packing import pack_batch

HiddenStatesFn = Callable[[Tensor, Tensor, AttentionLayout], Tensor]
"""(ids, position_ids [batch, tokens], layout) -> hidden states [logit positions, width]."""

_PROMPTS = ((3, 1, 4), (2, 5))
_COMPLETIONS = (((9, 2), (6,)), ((5, 3, 7),))
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest accepted difference, relative to the largest value."""


def shared_prefix_forward(causal_lm: Any) -> HiddenStatesFn | str:
    """Set the model up to share prompts and return its forward; or leave it unchanged and return the reason."""
    reason = _unsupported_reason(causal_lm)
    if reason is not None:
        return reason
    stock_attention = causal_lm.config._attn_implementation
    expected_hidden, expected_logits = _reference_outputs(causal_lm)
    causal_lm.set_attn_implementation(ATTENTION_NAME)
    forward: HiddenStatesFn = StockForward(causal_lm.base_model)
    try:
        hidden, logits = _shared_outputs(causal_lm, forward)
    except (TypeError, RuntimeError, AttributeError, KeyError) as error:
        causal_lm.set_attn_implementation(stock_attention)
        said = next(iter(str(error).splitlines()), "")[:200]
        return f"its layers do not pass a layout on to their attention ({type(error).__name__}: {said})"
    for name, shared, expected in (("hidden states", hidden, expected_hidden), ("logits", logits, expected_logits)):
        if not _close(shared, expected):
            causal_lm.set_attn_implementation(stock_attention)
            return f"its {name} differ when a prompt is shared"
    return _llama_forward_if_equal(causal_lm, expected_hidden) or forward


def _llama_forward_if_equal(causal_lm: Any, expected: Tensor) -> HiddenStatesFn | None:
    forward = llama_forward(causal_lm.base_model)
    if forward is None:
        return None
    try:
        hidden, _ = _shared_outputs(causal_lm, forward)
    except (TypeError, RuntimeError, AttributeError, IndexError):  # Llama's module names, another computation
        return None
    return forward if _close(hidden, expected) else None


class StockForward:
    """The model's own forward, with a layout: a `HiddenStatesFn`."""

    def __init__(self, base_model: Any):
        self.model = base_model

    def __call__(self, ids: Tensor, position_ids: Tensor, layout: AttentionLayout) -> Tensor:
        hidden: Tensor = self.model(input_ids=ids, position_ids=position_ids, use_cache=False, layout=layout)[0]
        hidden, logit_positions = hidden.flatten(0, 1), layout.logit_positions
        return hidden if logit_positions is None else hidden.index_select(0, logit_positions)


def _unsupported_reason(causal_lm: Any) -> str | None:
    config = causal_lm.config.get_text_config()
    layer_types = getattr(config, "layer_types", None) or ()
    unsupported = sorted({*layer_types} - {"full_attention"})
    window = None if layer_types else getattr(config, "sliding_window", None)
    if not getattr(causal_lm, "_supports_attention_backend", False):
        return "transformers gives it no choice of attention functions"
    if unsupported:
        return f"it has layers of {', '.join(unsupported)}, whose cache is not plain keys and values"
    if window is not None:
        return f"it attends within a sliding window of {window} tokens"
    if type(causal_lm.get_output_embeddings()) is not nn.Linear:
        return f"its head is {type(causal_lm.get_output_embeddings()).__name__}, not a plain linear layer"
    return None


@torch.no_grad()
def _reference_outputs(causal_lm: Any) -> tuple[Tensor, Tensor]:
    """Hidden states and logits of completions, each computed after its own copy of the prompt."""
    hidden, logits = [], []
    for prompt, group in zip(_PROMPTS, _COMPLETIONS, strict=True):
        for completion in group:
            ids = torch.tensor([[*prompt, *completion]], device=causal_lm.device)
            hidden.append(causal_lm.base_model(input_ids=ids, use_cache=False)[0][0, len(prompt) :])
            logits.append(causal_lm(input_ids=ids, use_cache=False).logits[0, len(prompt) :])
    return torch.cat(hidden), torch.cat(logits)


@torch.no_grad()
def _shared_outputs(causal_lm: Any, forward: HiddenStatesFn) -> tuple[Tensor, Tensor]:
    """The same with shared prompts."""
    packed = pack_batch(_PROMPTS, _COMPLETIONS, causal_lm.device)
    hidden = forward(packed.ids[None], packed.position_ids[None], packed)[len(_PROMPTS) :]
    return hidden, causal_lm.get_output_embeddings()(hidden)


def _close(shared: Tensor, expected: Tensor) -> bool:
    return shared.shape == expected.shape and _relative_error(shared, expected) <= _TOLERANCE[expected.dtype]


def _relative_error(shared: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest value. In half precision that of the median token: rounding alone may
    send some tokens to other experts.
    """
    by_token = (shared - expected).abs().amax(-1) / expected.abs().max()
    exact = expected.dtype in (torch.float32, torch.float64)
    return float(by_token.max() if exact else by_token.median())
