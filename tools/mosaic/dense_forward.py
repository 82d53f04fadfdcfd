"""A training pass over OLMoE's weights that computes all experts as two matrix products.

Equal to transformers' pass (a test compares them) and made for training at this size: half of the products have weight
zero, but there is no gather, sort or loop, and one block compiles to a few kernels. Many questions share one prefix
under a block mask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional
from transformers import LlavaForConditionalGeneration


@dataclass(frozen=True)
class SharedPrefixLayout:
    """Segments after a common prefix: each sees the prefix and itself, with positions that start after the prefix."""

    visible: Bool[Tensor, "tokens tokens"]
    positions: Int[Tensor, " tokens"]


def pack(prefix_tokens: int, segment_tokens: Sequence[int]) -> SharedPrefixLayout:
    """Lay out segments of these lengths after the prefix."""
    owner = [-1] * prefix_tokens
    positions = list(range(prefix_tokens))
    for segment, length in enumerate(segment_tokens):
        owner += [segment] * length
        positions += range(prefix_tokens, prefix_tokens + length)
    owners = torch.tensor(owner)
    shared = (owners[None, :] == -1) | (owners[None, :] == owners[:, None])
    visible = torch.ones(len(owner), len(owner), dtype=torch.bool).tril() & shared
    return SharedPrefixLayout(visible=visible, positions=torch.tensor(positions))


BlockPass = Callable[..., tuple[Tensor, Tensor]]


def block_weights(block: Any) -> tuple[Tensor, ...]:
    """The weights of one OLMoE block in the order `block_pass` takes them."""
    attention, mlp = block.self_attn, block.mlp
    return (
        block.input_layernorm.weight,
        attention.q_proj.weight,
        attention.k_proj.weight,
        attention.v_proj.weight,
        attention.o_proj.weight,
        attention.q_norm.weight,
        attention.k_norm.weight,
        block.post_attention_layernorm.weight,
        mlp.gate.weight,
        mlp.experts.gate_up_proj,
        mlp.experts.down_proj,
    )


def block_pass(  # noqa: PLR0913, PLR0917
    hidden: Float[Tensor, "rows tokens width"],
    attention_norm: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    query_norm: Tensor,
    key_norm: Tensor,
    expert_norm: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    visible: Tensor,
    cos: Tensor,
    sin: Tensor,
    last_rank: Int[Tensor, "1"],
    top_k: int,
    heads: int,
) -> tuple[Float[Tensor, "rows tokens width"], Float[Tensor, ""]]:
    """The block's output, and a loss of its routing that is 1 when all experts are chosen equally often.

    `last_rank` is the wanted top-k minus one: a tensor, so that another top-k needs no other compilation.
    """
    normed = rms_norm(hidden, attention_norm)
    queries = _apply_rotary(_split(rms_norm(functional.linear(normed, query), query_norm), heads), cos, sin)
    keys = _apply_rotary(_split(rms_norm(functional.linear(normed, key), key_norm), heads), cos, sin)
    values = _split(functional.linear(normed, value), heads)
    mixed = _attend(queries, keys, values, visible)
    hidden = hidden + functional.linear(mixed.transpose(1, 2).flatten(2), output)

    normed = rms_norm(hidden, expert_norm).flatten(0, 1)
    probabilities = torch.softmax(functional.linear(normed, router), dim=-1)
    threshold = torch.topk(probabilities.detach(), top_k, dim=-1).values.index_select(1, last_rank)
    chosen = (probabilities >= threshold).to(probabilities.dtype)
    experts, doubled, width = gate_up.shape
    inner = doubled // 2
    stacked = gate_up.view(experts, 2, inner, width).transpose(0, 1).reshape(2 * experts * inner, width)
    gate, up = functional.linear(normed, stacked).chunk(2, dim=-1)
    weighted = functional.silu(gate) * up * (probabilities * chosen).repeat_interleave(inner, dim=1)
    added = weighted @ down.transpose(1, 2).reshape(experts * inner, width)
    balance = (probabilities.mean(0) * chosen.mean(0)).sum() * experts / chosen.sum(1).mean()
    return hidden + added.view_as(hidden), balance


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float = 1e-5) -> Tensor:
    """Scale to unit root mean square, then by `weight`."""
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def _attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    # Written out: compiled, forward and backward took less time on CPU than with the fused operator.
    scores = queries @ keys.transpose(-1, -2) * queries.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill(~visible, -1e9), dim=-1) @ values


def _split(hidden: Tensor, heads: int) -> Tensor:
    return hidden.unflatten(-1, (heads, -1)).transpose(1, 2)


def _apply_rotary(hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = hidden.chunk(2, dim=-1)
    return hidden * cos + torch.cat([-second, first], dim=-1) * sin


def text_pass(
    model: LlavaForConditionalGeneration,
    embeddings: Float[Tensor, "rows tokens width"],
    layout: SharedPrefixLayout,
    *,
    blocks: Sequence[int],
    top_k: int,
    insertion_position: int = 1,
    run_block: BlockPass = block_pass,
) -> tuple[Float[Tensor, "rows tokens width"], Float[Tensor, ""]]:
    """The last hidden states after these blocks, and the mean loss of routing.

    Blocks before `insertion_position` run with the model's own top-k, the others with `top_k`.
    """
    text = model.model.language_model
    cos, sin = text.rotary_emb(embeddings, layout.positions[None])
    hidden, balance = embeddings, embeddings.new_zeros(())
    config = text.config
    full_rank, last_rank = torch.tensor([config.num_experts_per_tok - 1]), torch.tensor([top_k - 1])
    for block in blocks:
        hidden, block_balance = run_block(
            hidden,
            *block_weights(text.layers[block]),
            layout.visible,
            cos[0],
            sin[0],
            full_rank if block < insertion_position else last_rank,
            config.num_experts_per_tok,
            config.num_attention_heads,
        )
        balance = balance + block_balance / len(blocks)
    return rms_norm(hidden, text.norm.weight), balance
