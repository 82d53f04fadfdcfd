"""Initial weights: sizes such that 16 blocks start close to the identity, and words that already speak of places."""

import math

import torch
from transformers import LlavaForConditionalGeneration

from groupwise.workloads.controller.mosaic.words import PAD_TOKEN

_WORD_STD = 0.5
_HEAD_OF_WORD = 0.2
# Queries and keys start this much longer than normed, so that attention can tell one tile from twelve.
_SHARPNESS = 1.4
# Experts start this much louder than attention: what they add is then not soon overheard.
_EXPERT_GAIN = 3.0


def build(config: object, seed: int) -> LlavaForConditionalGeneration:
    """Return an untrained model with weights drawn from `seed`."""
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config)
    _start_words(model)
    _start_blocks(model)
    return model


@torch.no_grad()
def _start_words(model: LlavaForConditionalGeneration) -> None:
    words = model.model.language_model.embed_tokens.weight
    words.normal_(0, _WORD_STD)
    words[PAD_TOKEN] = 0
    # What a position says is first read off by likeness to the word itself.
    model.lm_head.weight.copy_(words * _HEAD_OF_WORD)


@torch.no_grad()
def _start_blocks(model: LlavaForConditionalGeneration) -> None:
    text = model.config.text_config
    into = text.hidden_size**-0.5
    residual = 1 / math.sqrt(2 * text.num_hidden_layers)
    # Routing weights are about 1 / experts each, and top-k of them are added up.
    routing = text.num_experts / math.sqrt(text.num_experts_per_tok)
    for block in model.model.language_model.layers:
        attention, experts = block.self_attn, block.mlp.experts
        # Like attends to like and copies it (mimetic initialisation, Trockman and Kolter, 2023).
        attention.q_proj.weight.normal_(0, into)
        attention.k_proj.weight.copy_(attention.q_proj.weight)
        attention.q_norm.weight.fill_(_SHARPNESS)
        attention.k_norm.weight.fill_(_SHARPNESS)
        attention.v_proj.weight.normal_(0, into)
        attention.o_proj.weight.copy_(attention.v_proj.weight.T * residual)
        block.mlp.gate.weight.normal_(0, 0.5 * into)
        experts.gate_up_proj.normal_(0, into)
        experts.down_proj.normal_(0, text.intermediate_size**-0.5 * residual * routing * _EXPERT_GAIN)
