"""Arithmetic, trace on fake tensors and the allocator agree on the memory of a controller."""

from dataclasses import replace

import pytest
import torch
import transformers
from allocator import peak_allocated
from tiny.molmoe import ASSET

from groupwise.core.shape import StepShape
from groupwise.memory.architecture import architecture
from groupwise.memory.stages import StepSpec
from groupwise.recipes import load_recipe
from groupwise.workloads.controller.memory import ControllerMemory, vision_tower
from groupwise.workloads.controller.model.load import read_config
from groupwise.workloads.controller.policy.network import ControllerNetwork
from groupwise.workloads.controller.tasks.mosaic.model import load_mosaic, mosaic_options
from groupwise.workloads.controller.tasks.mosaic.scene import CROPS, TOKENS_PER_CROP
from groupwise.workloads.controller.tasks.vqa.config import VqaConfig
from groupwise.workloads.controller.trace import controller_step, trace_controller

SPEC = StepSpec(StepShape(10**6, 2, 4, 1, 4, "whole"), fused_optimizer=True)
TEXT = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
TEXT |= {"intermediate_size": 32, "vocab_size": 256, "tie_word_embeddings": False}
TEXT |= {"num_experts": 4, "num_experts_per_tok": 4}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"num_channels": 1, "image_size": 8, "patch_size": 4, "vision_use_head": False}


@pytest.mark.parametrize("new_tokens", [1, 4])
def test_plan_trace_and_allocator_agree(new_tokens):
    config = transformers.LlavaConfig(
        vision_config=transformers.SiglipVisionConfig(**VISION),
        text_config=transformers.OlmoeConfig(**TEXT, pad_token_id=0, eos_token_id=1, bos_token_id=None),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
    memory = ControllerMemory(
        architecture({"model_type": "olmoe", **TEXT}),
        vision_tower(VISION, 64),
        {"low": 2, "high": 5},
        positions=5,
        question_tokens=4,
        options=(2, 5, 3, 3),
        new_tokens=new_tokens,
    )
    traced = trace_controller(config, memory, SPEC)
    real = controller_step(config, memory, SPEC, fake=False)
    held = sum(tensor.nbytes for tensor in (*real.held, *real.policy.buffers()))
    with torch.no_grad():
        truth = held + 3 * sum(weight.nbytes for weight in real.trained) + peak_allocated(real.rollout)
    assert traced["rollout"] == pytest.approx(truth, rel=0.02)
    planned = memory.predict(SPEC)
    assert sum(planned.rollout.values()) == pytest.approx(traced["rollout"], rel=0.10)
    assert sum(planned.update.values()) == pytest.approx(traced["update"], rel=0.10)


def test_plan_and_allocator_agree_on_molmoe():
    """Its crops are large and the tiny model is not, so that vision decides. A trace counts more: it unfolds crops."""
    memory = replace(
        VqaConfig(model=str(ASSET), max_new_tokens=1, crops={"low": 1, "high": 2}).memory_model(),
        positions=3,
        options=(2, 3, 3, 2),
    )
    config = read_config(str(ASSET))
    real = controller_step(config, memory, SPEC, fake=False)
    frozen = sum(weight.numel() for weight in real.held if weight.requires_grad)
    assert sum(memory.frozen_params.values()) == frozen
    held = sum(tensor.nbytes for tensor in (*real.held, *real.policy.buffers()))
    with torch.no_grad():
        truth = held + 3 * sum(weight.nbytes for weight in real.trained) + peak_allocated(real.rollout)
    planned = memory.predict(SPEC)
    assert sum(planned.rollout.values()) == pytest.approx(truth, rel=0.15)
    traced = trace_controller(config, memory, SPEC)
    assert traced["rollout"] > 0.98 * truth
    assert sum(planned.update.values()) == pytest.approx(traced["update"], rel=0.10)


def test_the_network_and_the_frozen_model_are_counted_exactly():
    memory: ControllerMemory = load_recipe("controller").workload.memory_model()
    assert memory.crops == {tier.value: 1 + count for tier, count in CROPS.items()}
    assert memory.vision.patches == TOKENS_PER_CROP
    model = load_mosaic()
    assert memory.text.parameters + memory.vision.parameters == sum(w.numel() for w in model.parameters())
    policy = ControllerNetwork(memory.text.width, mosaic_options())
    assert memory.policy_params == sum(weight.numel() for weight in policy.parameters())
