"""Arithmetic, trace on fake tensors and the allocator agree on the memory of chat."""

import pytest
import torch
import transformers
from allocator import peak_allocated

from groupwise.core.placement import RolloutRows
from groupwise.core.shape import StepShape
from groupwise.memory.architecture import architecture
from groupwise.memory.stages import StepSpec
from groupwise.memory.trace import trace_rollout, trace_update
from groupwise.training.config import OptimizerConfig
from groupwise.training.state import create_state
from groupwise.workloads.chat.config import PolicyConfig, SamplingParams
from groupwise.workloads.chat.engine.generate import generate
from groupwise.workloads.chat.memory import ChatMemory
from groupwise.workloads.chat.trace import chat_step, fake_policy

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 128, "vocab_size": 256, "tie_word_embeddings": False}
SPEC = StepSpec(StepShape(10**6, 2, 4, 1, 4, "whole"), fused_optimizer=True)
TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
POLICIES = {
    "full": {},
    "checkpointing": {"gradient_checkpointing": True},
    "LoRA": {"lora_rank": 8},
    "reference": {"reference": "copy"},
}


@pytest.mark.parametrize("name", POLICIES)
def test_plan_trace_and_allocator_agree_on_an_update(name):
    config = transformers.AutoConfig.for_model("llama", **SIZES, **TOKENS)
    policy_config = PolicyConfig(model="-", **POLICIES[name])
    memory = ChatMemory(
        architecture({"model_type": "llama", **SIZES}),
        24,
        16,
        lora_rank=policy_config.lora_rank,
        checkpointing=policy_config.gradient_checkpointing,
        reference_copies=int(policy_config.reference == "copy"),
    )
    traced = {}
    for fake in (True, False):
        policy = fake_policy(config, policy_config, fake=fake)
        assert policy.shares_prefix
        step = chat_step(policy, memory, SPEC)
        traced[fake] = trace_update(step, SPEC)
    optimizer = create_state(policy, OptimizerConfig()).optimizer

    def update():
        for _ in range(2):
            step.update_pass().backward()
        optimizer.step()

    update()
    optimizer.zero_grad(set_to_none=True)
    held = sum(tensor.nbytes for tensor in (*policy.parameters(), *policy.buffers(), *step.held))
    truth = held + 2 * sum(weight.nbytes for weight in step.trained) + peak_allocated(update)
    assert traced[True] == pytest.approx(truth, rel=0.02)
    assert traced[False] == pytest.approx(truth, rel=0.02)
    assert sum(memory.predict(SPEC).update.values()) == pytest.approx(truth, rel=0.10)


@pytest.mark.parametrize("model_type", ["llama", "olmoe"])
def test_plan_trace_and_allocator_agree_on_a_rollout(model_type):
    """Two prompts, four rows each, to the last token: the rows' own caches grow once on the way."""
    sizes = SIZES | ({"num_experts": 4, "num_experts_per_tok": 2} if model_type == "olmoe" else {})
    config = transformers.AutoConfig.for_model(model_type, **sizes, **TOKENS)
    memory, rows = ChatMemory(architecture({"model_type": model_type, **sizes}), 24, 48), 8
    traced = trace_rollout(chat_step(fake_policy(config, PolicyConfig(model="-")), memory, SPEC))
    policy = fake_policy(config, PolicyConfig(model="-"), fake=False)
    group = torch.arange(rows) // 4
    placed = RolloutRows(0, 0, rows, group, torch.arange(rows) % 4, group)
    prompts = [[1 + index for index in range(24)]] * 2
    held = sum(buffer.nbytes for buffer in policy.buffers()) + 3 * sum(weight.nbytes for weight in policy.parameters())
    completions = []

    def rollout():
        completions.extend(generate(policy, prompts, group.tolist(), placed, SamplingParams(max_new_tokens=48)))

    truth = held + peak_allocated(rollout)
    assert {len(completion) for completion in completions} == {48}
    assert traced == pytest.approx(truth, rel=0.02)
    assert sum(memory.predict(SPEC).rollout.values()) == pytest.approx(traced, rel=0.10)
