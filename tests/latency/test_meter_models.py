"""The meter on stock classes of transformers, under `generate` and under the executor."""

import functools

import pytest
import torch
from tiny.llava import IMAGE_TOKEN, OPTIONS, llava_olmoe, sample
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from groupwise.latency.meter import LatencyMeter, find_model_parts
from groupwise.workloads.controller.model.adapters import adapter_for
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor, PrefixItem
from groupwise.workloads.controller.model.knobs import Knobs

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
QWEN_VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
QWEN_TOKENS = {"image_token_id": 39, "video_token_id": 38, "vision_start_token_id": 37, "vision_end_token_id": 36}


def text_model(config_class, model_class, **more):
    return model_class(config_class(**SMALL, **more)).eval(), {"input_ids": torch.tensor([[1, 2, 3]])}


def llava():
    crops, question = sample(0).crops_by_tier["low"], [1, 2, 3]
    ids = [IMAGE_TOKEN] * (len(crops) * 4) + question
    return llava_olmoe(), {"input_ids": torch.tensor([ids]), "pixel_values": crops}


def llava_next():
    plain = llava_olmoe().config
    config = LlavaNextConfig(
        vision_config=plain.vision_config,
        text_config=plain.text_config,
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_grid_pinpoints=[[8, 8]],
    )
    # An overview of 2 x 2 tokens, and one tile of 2 x 2 with a newline after each row.
    inputs = {
        "input_ids": torch.tensor([[IMAGE_TOKEN] * 10 + [1, 2, 3]]),
        "pixel_values": torch.randn(1, 2, 1, 8, 8),
        "image_sizes": torch.tensor([[8, 8]]),
    }
    return LlavaNextForConditionalGeneration(config).eval(), inputs


def qwen(config_class, model_class, **more):
    text = {**SMALL, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}, **more}
    config = config_class(text_config=text, vision_config=QWEN_VISION, **QWEN_TOKENS)
    grid = torch.tensor([[1, 4, 4]])
    inputs = {
        "input_ids": torch.tensor([[37, *[39] * 4, 36, 1, 2]]),
        "mm_token_type_ids": torch.tensor([[0, 1, 1, 1, 1, 0, 0, 0]]),
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4),
        "image_grid_thw": grid,
    }
    return model_class(config).eval(), inputs


TEXT_MODELS = {
    "Llama": lambda: text_model(LlamaConfig, LlamaForCausalLM),
    "Olmoe": lambda: text_model(OlmoeConfig, OlmoeForCausalLM, num_experts=4, num_experts_per_tok=2),
    "Qwen3": lambda: text_model(Qwen3Config, Qwen3ForCausalLM),
}
VISION_MODELS = {
    "Llava": llava,
    "LlavaNext": llava_next,
    "Qwen3VL": lambda: qwen(Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    "Qwen3VLMoe": lambda: qwen(Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration, **EXPERTS),
}


class Ticks:
    """A clock that moves only inside a model's parts: 1000 in each of vision, 10 in a block, 1 in the head."""

    def __init__(self, parts):
        self.now_ms, self.blocks_run = 0.0, set()
        for ms, modules in ((1000, parts.vision.values()), (10, parts.blocks), (1, [parts.head])):
            for index, module in enumerate(modules):
                module.register_forward_hook(functools.partial(self.tick, ms, index))

    def tick(self, ms, index, *_):
        self.now_ms += ms
        if ms == 10:
            self.blocks_run.add(index)

    def __call__(self):
        return self.now_ms / 1000


@pytest.mark.parametrize("name", [*TEXT_MODELS, *VISION_MODELS])
def test_generate_is_split_into_stages(name):
    torch.manual_seed(0)
    model, inputs = (TEXT_MODELS | VISION_MODELS)[name]()
    parts = find_model_parts(model)
    clock, blocks, given = Ticks(parts), model.config.get_text_config().num_hidden_layers, []

    def answer():
        given.append(model.generate(**inputs, do_sample=False, max_new_tokens=4, min_new_tokens=4))

    timing = LatencyMeter(parts, clock=clock).time(answer)
    assert given[0].shape[1] == inputs["input_ids"].shape[1] + 4
    one_pass = 10 * blocks + 1  # block 0 among them, from the first pass on
    vision = {"Llava": 2000, "LlavaNext": 2000, "Qwen3VL": 1000, "Qwen3VLMoe": 1000}.get(name, 0)
    assert timing.stages_ms == pytest.approx({"vision": vision, "prefill": one_pass, "decode": 3 * one_pass})
    assert timing.decode_steps_ms == pytest.approx((one_pass,) * 3)


def test_vision_is_the_tower_and_the_projector():
    model = llava_olmoe()
    parts = find_model_parts(model)
    assert list(parts.vision) == ["vision_tower", "multi_modal_projector"]
    assert parts.vision["vision_tower"] is model.model.vision_tower
    assert parts.blocks == tuple(model.model.language_model.layers)
    assert parts.head is model.lm_head
    assert parts.norm is model.model.language_model.norm
    assert parts.embedding is model.get_input_embeddings()


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("with_prefix", [False, True])
def test_the_executor_is_split_into_stages_and_skipped_blocks_cost_nothing(tokens, with_prefix):
    model = llava_olmoe()
    parts = find_model_parts(model)
    clock = Ticks(parts)
    executor, knobs, question = Executor(adapter_for(model), OPTIONS), Knobs("medium", 2, 1, 5), sample(2)

    def answer():
        prefix = executor.run_prefix([PrefixItem([question], knobs.tier)], torch.zeros(32)) if with_prefix else None
        executor.answer([AnswerRequest(question, knobs)], prefix=prefix, max_new_tokens=tokens)

    timing = LatencyMeter(parts, clock=clock).time(answer)
    # Five of eight blocks. The prefix runs three in full; two are gone on from, and the third is run again with top-1.
    first = 10 * (5 + with_prefix) + 1
    assert timing.stages_ms == pytest.approx({"vision": 2000, "prefill": first, "decode": (tokens - 1) * 51})
    assert timing.decode_steps == tokens - 1
    ran = {block for block, top_k in enumerate(OPTIONS.block_path(knobs)) if top_k} | ({2} if with_prefix else set())
    assert clock.blocks_run == ran
    assert len(ran) == 5 + with_prefix
