"""Arithmetic and trace on fake tensors agree on the memory of a video flow model."""

from dataclasses import replace

import pytest
import torch

from groupwise.core.shape import StepShape
from groupwise.memory.stages import StepSpec
from groupwise.memory.trace import trace_step
from groupwise.workloads.flow.config import TrainedPartsConfig
from groupwise.workloads.flow.image_memory import image_architecture
from groupwise.workloads.flow.memory import FlowMemory, wan_architecture
from groupwise.workloads.flow.tasks.sprites.config import SpritesConfig
from groupwise.workloads.flow.tasks.sprites.model import SpritesModel, load_sprites
from groupwise.workloads.flow.tasks.sprites.scene import encode_prompts
from groupwise.workloads.flow.trace import fake_transformer, flow_step

SIZES = {"_class_name": "WanTransformer3DModel", "num_attention_heads": 2, "attention_head_dim": 32}
SIZES |= {"num_layers": 1, "ffn_dim": 256, "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 32}
CASES = [("all", 1, {}), ("lora", 1, {}), ("all", 2, {"shared_noise": True}), ("lora", 2, {"shared_noise": True})]
CASES += [("all", 2, {"checkpointing": True}), ("lora", 1, {"checkpointing": True, "shared_noise": True})]
LARGER = {"latent": (4, 8, 32, 32)}
CASES += [("lora", 2, {**LARGER, "dtype_bytes": 2, "guided": True, "guided_together": False, "checkpointing": True})]
CASES += [("camera", 1, {**LARGER, "dtype_bytes": 2}), ("recam", 1, LARGER)]
IMAGES = {
    "sd3": {
        "_class_name": "SD3Transformer2DModel",
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "caption_projection_dim": 512,
        "pooled_projection_dim": 32,
        "qk_norm": "rms_norm",
        "sample_size": 64,
        "pos_embed_max_size": 32,
    },
    "flux": {
        "_class_name": "FluxTransformer2DModel",
        "patch_size": 1,
        "in_channels": 16,
        "num_single_layers": 2,
        "guidance_embeds": True,
        "pooled_projection_dim": 32,
        "axes_dims_rope": (8, 28, 28),
    },
    "qwen-image": {
        "_class_name": "QwenImageTransformer2DModel",
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 4,
        "axes_dims_rope": (8, 28, 28),
    },
}
IMAGES["sd3.5-medium"] = {**IMAGES["sd3"], "dual_attention_layers": (0,)}
IMAGE_SIZES = {"num_layers": 2, "num_attention_heads": 8, "attention_head_dim": 64, "joint_attention_dim": 32}


def assert_plan_is_traced(memory, transformer, spec):
    traced, planned = trace_step(flow_step(transformer, memory, spec), spec), memory.predict(spec)
    assert sum(planned.update.values()) == pytest.approx(traced["update"], rel=0.10)
    assert sum(planned.rollout.values()) == pytest.approx(traced["rollout"], rel=0.10)


def dtype_of(memory):
    return torch.float32 if memory.dtype_bytes == 4 else torch.bfloat16


@pytest.mark.parametrize(("part", "steps", "fields"), CASES)
def test_plan_and_trace_agree(part, steps, fields):
    fields = {"latent": (4, 4, 16, 16), "text_tokens": 8, "lora_rank": 4, **fields}
    memory = FlowMemory(wan_architecture(SIZES), trained_steps=steps, part=part, **fields)
    train = TrainedPartsConfig(part=part, lora_rank=4)
    transformer = fake_transformer(SIZES, train, checkpointing=memory.checkpointing, dtype=dtype_of(memory))
    parameters = sum(weight.numel() for weight in transformer.parameters())
    assert parameters == memory.model.parameters + (memory.model.lora_params(4) if part == "lora" else 0)
    trained = sum(weight.numel() for weight in transformer.parameters() if weight.requires_grad)
    assert trained == memory.model.trained_params(part, 4)
    spec = StepSpec(StepShape(10**6, 2, 2, 1, 2, "whole"), fused_optimizer=True)
    assert memory.first_step_rows(spec) == (1 if memory.shared_noise else 2)
    assert_plan_is_traced(memory, transformer, spec)


def test_plan_and_trace_agree_without_camera_layers():
    """Wan from an image: more channels go in, and the image's embedding is attended to."""
    wide = {"num_attention_heads": 16, "ffn_dim": 2048}
    content = {**SIZES, **wide, "in_channels": 8, "image_dim": 16, "added_kv_proj_dim": 512}
    architecture = replace(wan_architecture(content), pose_dim=0)
    memory = FlowMemory(architecture, (4, 8, 16, 32), 2, "lora", text_tokens=8, lora_rank=4, checkpointing=True)
    train = TrainedPartsConfig(lora_rank=4)
    transformer = fake_transformer(content, train, camera=False, checkpointing=True)
    parameters = sum(weight.numel() for weight in transformer.parameters())
    assert parameters == architecture.parameters + architecture.lora_params(4)
    assert_plan_is_traced(memory, transformer, StepSpec(StepShape(10**6, 2, 2, 1, 2, "whole"), fused_optimizer=True))


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize(("dtype_bytes", "checkpointing"), [(2, True), (4, False)])
def test_plan_and_trace_of_image_models_agree(name, dtype_bytes, checkpointing):
    content = {**IMAGE_SIZES, **IMAGES[name]}
    fields = {"text_tokens": 32, "lora_rank": 4, "dtype_bytes": dtype_bytes, "checkpointing": checkpointing}
    memory = FlowMemory(image_architecture(content), (4, 64, 64), 2, "lora", **fields)
    transformer = fake_transformer(
        content, TrainedPartsConfig(lora_rank=4), camera=False, checkpointing=checkpointing, dtype=dtype_of(memory)
    )
    parameters = sum(weight.numel() for weight in transformer.parameters())
    assert parameters == memory.model.parameters + memory.model.trained_params("lora", 4)
    assert_plan_is_traced(memory, transformer, StepSpec(StepShape(10**6, 2, 2, 1, 2, "whole"), fused_optimizer=True))


def test_finished_clips_are_not_counted_on_the_device():
    """They wait in the host's memory: more rollouts change nothing, more clips decoded at a time do."""
    for conditions, rows, expected in ((2, 1, 4_000_000), (8, 1, 4_000_000), (8, 4, 16_000_000)):
        memory = FlowMemory(wan_architecture(SIZES), (4, 4, 16, 16), 1, pixels=10**6, dtype_bytes=2, decode_rows=rows)
        spec = StepSpec(StepShape(10**6, conditions, 2, 1, 2, "whole"))
        # the decoder's clips and the same within -1..1, in bfloat16: decode_rows x 2 x 10**6 x 2 bytes
        assert memory.predict(spec).rollout["decoded frames"] == expected


def test_the_embedded_clips_are_planned_as_they_are():
    memory = SpritesConfig().memory_model()
    assert memory.latent == SpritesModel(load_sprites()).condition_spec.latent_shape
    assert memory.text_tokens == encode_prompts(["by day"]).shape[1]
