"""A tiny random Qwen3-VL with a dense block, samples for it, and stock transformers with knobs as the reference."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import Qwen2VLImageProcessor, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from groupwise.workloads.controller.model.adapters import Sample
from groupwise.workloads.controller.model.knobs import KnobOptions
from tiny.llava import IMAGE_MEAN, IMAGE_STD, tokenizer

IMAGE_TOKEN, PATCH, MERGE = 39, 4, 2
SIDE = PATCH * MERGE


def qwen(
    config: type = Qwen3VLMoeConfig, model: type = Qwen3VLMoeForConditionalGeneration
) -> Qwen3VLMoeForConditionalGeneration:
    """6 blocks, number 3 dense; top-4 of 6 experts, weights renormalized; deepstack features after blocks 0 and 1."""
    torch.manual_seed(5)
    text = {
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 24,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 4,
        "mlp_only_layers": [3],
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        "initializer_range": 0.2,
    }
    vision = {
        "depth": 3,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.2,
    }
    sizes = config(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_TOKEN,
        video_token_id=40,
        vision_start_token_id=41,
        vision_end_token_id=42,
    )
    made = model(sizes).eval()
    with torch.no_grad():  # placeholders are never the best next token: they tie with the word before them
        made.lm_head.weight[IMAGE_TOKEN:] = made.lm_head.weight[IMAGE_TOKEN - 1]
    return made


OPTIONS = KnobOptions(
    crops_by_tier={"low": 0, "medium": 0, "high": 0},
    pixels={"low": 3 * SIDE**2, "medium": 5 * SIDE**2, "high": 8 * SIDE**2},
    total_blocks=6,
    full_top_k=4,
    drop_order=(1, 4, 3, 5, 2),
    insertion_positions=(1, 2, 3),
    max_dropped_blocks=2,
    smallest_top_k=1,
    dense_blocks=(3,),
)
SHAPES = ({"low": (1, 3), "medium": (2, 2), "high": (2, 4)}, {"low": (3, 1), "medium": (5, 1), "high": (3, 2)})


def sample(number: int) -> Sample:
    generator = torch.Generator().manual_seed(number)
    images = {
        tier: torch.randn(1, 3, rows * SIDE, columns * SIDE, generator=generator)
        for tier, (rows, columns) in SHAPES[number % 2].items()
    }
    before, after = (1 + int(torch.randint(4, (), generator=generator)) for _ in range(2))
    words = torch.randint(1, IMAGE_TOKEN, (before + after,), generator=generator).tolist()
    return Sample(f"sample {number}", images, tuple(words[before:]), tuple(words[:before]))


def patches_of(image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One patch after the other, by hand: merge windows row by row, inside each its patches; the frame twice."""
    _, height, width = image.shape
    found = [
        image[:, None, y + dy : y + dy + PATCH, x + dx : x + dx + PATCH].expand(-1, 2, -1, -1).flatten()
        for y in range(0, height, SIDE)
        for x in range(0, width, SIDE)
        for dy in range(0, SIDE, PATCH)
        for dx in range(0, SIDE, PATCH)
    ]
    return torch.stack(found), torch.tensor([[1, height // PATCH, width // PATCH]])


class Skipped(nn.Module):
    """Stands where a block was: what is numbered by blocks keeps its number."""

    def forward(self, hidden_states, **_):
        return hidden_states


@torch.no_grad()
def stock_answer(model, options, request, new_tokens):
    """One configuration with transformers' own forward passes, nothing remembered between tokens."""
    text, path, sample = model.model.language_model, options.block_path(request.knobs), request.sample
    patches, grid = patches_of(sample.crops_by_tier[request.knobs.tier][0])
    image_tokens = [IMAGE_TOKEN] * (len(patches) // MERGE**2)
    ids = [*sample.prefix_ids, *image_tokens, *sample.question_ids]
    blocks = text.layers
    experts = [getattr(block.mlp, "gate", None) for block in blocks]
    text.layers = nn.ModuleList([block if k else Skipped() for block, k in zip(blocks, path, strict=True)])
    first = None
    try:
        for gate, k in zip(experts, path, strict=True):
            if gate is not None and k:
                gate.top_k = k
        for _ in range(new_tokens):
            given = torch.tensor([ids])
            logits = model(
                input_ids=given,
                mm_token_type_ids=(given == IMAGE_TOKEN).int(),
                pixel_values=patches,
                image_grid_thw=grid,
                use_cache=False,
            ).logits[0, -1]
            first = logits if first is None else first
            ids.append(int(logits.argmax()))
    finally:
        text.layers = blocks
        for gate in experts:
            if gate is not None:
                gate.top_k = options.full_top_k
    return tuple(ids[-new_tokens:]), first


def save_qwen(folder: Path) -> Qwen3VLMoeForConditionalGeneration:
    model = qwen()
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    qwen_processor(10**6).save_pretrained(folder)
    return model


def qwen_processor(max_pixels: int) -> Qwen2VLImageProcessor:
    return Qwen2VLImageProcessor(
        size={"shortest_edge": 1, "longest_edge": max_pixels},
        patch_size=PATCH,
        merge_size=MERGE,
        image_mean=IMAGE_MEAN,
        image_std=IMAGE_STD,
    )
