"""Tiny random models of many families of transformers, for the sweep that compares each with the executor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from groupwise.core.errors import UserError
from groupwise.workloads.controller.model.adapters import FAMILIES as ADAPTERS
from groupwise.workloads.controller.model.adapters import adapter_for, default_options
from groupwise.workloads.controller.model.load import LoadedModel
from groupwise.workloads.controller.model.self_check import compare

WORDS, IMAGE_TOKEN, SIDE = 64, 63, 8

TEXT = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 16, "norm_topk_prob": True}
GROUPS = {
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_shared_experts": 1,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}

TEXT_MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "phi3": {},
    "phi": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "glm": {},
    "glm4": {},
    "granite": {"embedding_multiplier": 6.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "cohere": {},
    "cohere2": {},
    "stablelm": {},
    "starcoder2": {},
    "smollm3": {},
    "exaone4": {},
    "nemotron": {},
    "ernie4_5": {},
    "gpt_neox": {},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 32},
    "mamba": {},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 4},
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 4},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 4, "sliding_window": None},
    "qwen2_moe": {"num_experts": 6, "shared_expert_intermediate_size": 16, **EXPERTS},
    "qwen3_moe": {"num_experts": 6, "mlp_only_layers": [1], **EXPERTS},
    "phimoe": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "granitemoe": {
        "num_local_experts": 6,
        "num_experts_per_tok": 4,
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.3,
    },
    "granitemoeshared": {"num_local_experts": 6, "num_experts_per_tok": 4, "shared_intermediate_size": 16},
    "glm4_moe": {"n_routed_experts": 6, **EXPERTS, **GROUPS},
    "deepseek_v2": {"n_routed_experts": 6, **EXPERTS, **GROUPS, **LATENT, "topk_method": "greedy"},
    "deepseek_v3": {"n_routed_experts": 6, **EXPERTS, **GROUPS, **LATENT},
    "dots1": {"n_routed_experts": 6, **EXPERTS, **GROUPS},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 4, "moe_layer_start_index": 1, "moe_intermediate_size": 16},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 4, "sliding_window": 128},
    "llama4_text": {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size_mlp": 32},
    "hunyuan_v1_moe": {"num_experts": 6, "moe_topk": 4},
    "minimax": {"num_local_experts": 6, "num_experts_per_tok": 4},
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 4, "rotary_dim": 8},
    "jamba": {"num_experts": 6, "num_experts_per_tok": 4},
    "lfm2": {},
    "qwen3_next": {"num_experts": 6, "shared_expert_intermediate_size": 16, **EXPERTS},
}


VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 4,
}
VISION_MODELS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "siglip_vision_model": ({"vision_use_head": False}, "full"),
    "clip_vision_model": ({}, "default"),
    "pixtral": ({"head_dim": 8}, "full"),
}
"""Their settings, and which of their features LLaVA takes."""


def text_config(model_type: str, **settings: Any) -> Any:
    return transformers.AutoConfig.for_model(model_type, **{**TEXT, **TEXT_MODELS[model_type], **settings})


def llava(text: str = "llama", vision: str = "siglip_vision_model", **settings: Any) -> Any:
    """LLaVA with these types of text and vision models."""
    torch.manual_seed(0)
    vision_settings, features = VISION_MODELS[vision]
    config = transformers.LlavaConfig(
        vision_config=transformers.AutoConfig.for_model(vision, **{**VISION, **vision_settings}),
        text_config=text_config(text, **settings),
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
        vision_feature_select_strategy=features,
        tie_word_embeddings=False,
    )
    return randomized(transformers.LlavaForConditionalGeneration(config))


def internvl(text: str = "qwen2") -> Any:
    torch.manual_seed(0)
    config = transformers.InternVLConfig(
        vision_config=transformers.InternVLVisionConfig(**{**VISION, "image_size": 16}),
        text_config=text_config(text),
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=False,
    )
    return randomized(transformers.InternVLForConditionalGeneration(config))


def llava_next(text: str = "llama", vision: str = "clip_vision_model") -> Any:
    torch.manual_seed(0)
    vision_settings, features = VISION_MODELS[vision]
    config = transformers.LlavaNextConfig(
        vision_config=transformers.AutoConfig.for_model(vision, **{**VISION, **vision_settings}),
        text_config=text_config(text),
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
        vision_feature_select_strategy=features,
        image_grid_pinpoints=[[8, 16], [16, 8], [16, 16], [24, 8], [8, 24]],
        tie_word_embeddings=False,
    )
    return randomized(transformers.LlavaNextForConditionalGeneration(config))


def qwen_vl(version: str) -> Any:
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL or Qwen3-VL-MoE."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    experts = {"num_experts": 6, "num_experts_per_tok": 4, "moe_intermediate_size": 16} if "Moe" in version else {}
    is_third = version.startswith("Qwen3")
    vision = {
        "depth": 2,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "embed_dim": 16,
        "hidden_size": 32 if version == "Qwen2VL" else 16,
        "out_hidden_size": 32,
        "intermediate_size": 32,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    }
    known = VISION_FIELDS[version] | ({"deepstack_visual_indexes", "num_position_embeddings"} if is_third else set())
    config = getattr(transformers, f"{version}Config")(
        text_config={**TEXT, **experts, "rope_parameters": rope},
        vision_config={name: value for name, value in vision.items() if name in known},
        image_token_id=IMAGE_TOKEN,
        video_token_id=62,
        vision_start_token_id=61,
        vision_end_token_id=60,
        tie_word_embeddings=False,
    )
    return randomized(getattr(transformers, f"{version}ForConditionalGeneration")(config))


_SHARED = {"depth", "num_heads", "patch_size", "spatial_merge_size", "hidden_size"}
VISION_FIELDS = {
    "Qwen2VL": _SHARED | {"embed_dim"},
    "Qwen2_5_VL": _SHARED | {"out_hidden_size", "intermediate_size", "window_size", "fullatt_block_indexes"},
    "Qwen3VL": _SHARED | {"out_hidden_size", "intermediate_size"},
    "Qwen3VLMoe": _SHARED | {"out_hidden_size", "intermediate_size"},
}

LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
FAMILIES: Mapping[str, Callable[[], Any]] = {
    **{f"LLaVA, {text}": partial(llava, text) for text in TEXT_MODELS},
    "LLaVA, llama, CLIP": partial(llava, vision="clip_vision_model"),
    "LLaVA, llama, Pixtral": partial(llava, vision="pixtral"),
    "LLaVA, phi3 with longrope": partial(
        llava, "phi3", rope_parameters={**LONG_ROPE, "original_max_position_embeddings": 128}
    ),
    "LLaVA-NeXT, llama, CLIP": llava_next,
    "LLaVA-NeXT, olmoe, SigLIP": partial(llava_next, "olmoe", "siglip_vision_model"),
    "InternVL, qwen2": internvl,
    "InternVL, qwen3_moe": partial(internvl, "qwen3_moe"),
    **{version: partial(qwen_vl, version) for version in VISION_FIELDS},
}
"""What the sweep builds, by the name it has in docs/model-families.md."""


@torch.no_grad()
def randomized(model: Any) -> Any:
    """No weight is zero or one, as it may be in a new model: each must matter."""
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.copy_(0.2 * noise if weight.ndim > 1 else weight + 0.1 * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model.eval()


SLIDING: Mapping[str, Mapping[str, Any]] = {
    "mistral": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 0},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 0},
    "olmo3": {},
    "phi3": {},
    "gemma3_text": {},
    "cohere2": {},
    "exaone4": {},
    "smollm3": {"use_sliding_window": True},
    "starcoder2": {},
    "mixtral": {},
    "dots1": {},
}
"""Text models that can have sliding windows, and the settings that turn them on."""


def outcome(build: Callable[[], Any]) -> str:
    """`equal`, or why the model is refused."""
    try:
        model = build()
        adapter = adapter_for(model)
        loaded = LoadedModel("tiny", model, adapter, default_options(adapter), drop_order_is_measured=False)
        compare(loaded)
    except UserError as error:
        return f"refused: {str(error).split('cannot be controlled: ')[1].split('. ')[0]}"
    unavailable = "top_k" in loaded.options.unavailable and loaded.options.full_top_k > 1
    return "equal, without the top-k knob" if unavailable else "equal"


def classes_without_adapter() -> list[str]:
    """transformers' classes of images and text to text that `load_model` refuses by name."""
    return sorted(set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()) - set(ADAPTERS))


def table(outcomes: Mapping[str, str]) -> str:
    """The table of docs/model-families.md."""
    rows = [f"| {name} | {result} |" for name, result in outcomes.items()]
    return "\n".join(["| family | result |", "|---|---|", *rows])


if __name__ == "__main__":
    sys.stdout.write(table({name: outcome(build) for name, build in FAMILIES.items()}) + "\n")
    sys.stdout.write(", ".join(f"`{name}`" for name in classes_without_adapter()) + "\n")
