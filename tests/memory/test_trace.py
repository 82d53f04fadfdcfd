"""Fake tensors take no memory and count the same as the allocator; the arithmetic agrees with them."""

import gc
from dataclasses import replace

import pytest
import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from groupwise.core.placement import RolloutRows
from groupwise.core.shape import StepShape
from groupwise.memory.architecture import architecture
from groupwise.memory.stages import StepSpec, WeightBytes, peak_of_update
from groupwise.memory.trace import LiveByteCounter, fake_tensors, trace_update
from groupwise.training.config import Config, OptimizerConfig
from groupwise.training.state import create_state
from groupwise.training.update import _apply
from groupwise.workloads.chat.config import PolicyConfig
from groupwise.workloads.chat.engine.generate import generate
from groupwise.workloads.chat.engine.sampler import SamplingParams
from groupwise.workloads.chat.memory import ChatMemory
from groupwise.workloads.chat.trace import fake_policy, followed_rollout, scored_pass, traced_rollout
from groupwise.workloads.controller.memory import ControllerMemory, vision_of
from groupwise.workloads.controller.trace import fake_controller, traced_controller
from groupwise.workloads.flow.memory import FlowMemory, video_model

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 128, "vocab_size": 256, "tie_word_embeddings": False}
JOB = StepSpec(StepShape(10**6, 2, 4, 1, 4, "whole"), fused=True)
POLICIES = {
    "full": {},
    "checkpointing": {"gradient_checkpointing": True},
    "LoRA": {"lora_rank": 8},
    "reference": {"reference": "copy"},
}


def allocated(act):
    """What the allocator hands out at most while `act` runs."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        act()
    events = watched.profiler.kineto_results.events()
    sizes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    now = peak = 0
    for _, size in sizes:
        now += size
        peak = max(peak, now)
    return peak


def test_a_sum_by_hand():
    with LiveByteCounter() as live:
        first = torch.zeros(100)  # 400 bytes
        second = first + 1  # 800
        del first  # 400
        third = second[:50].clone()  # 600
        assert (live.now, live.peak) == (600, 800)
        view = third.view(5, 10)
        assert live.now == 600, "a view takes nothing"
        del third, view, second
        assert live.now == 0


def test_fake_tensors_take_no_memory():
    def terabyte():
        with fake_tensors():
            return torch.nn.Linear(1 << 19, 1 << 19)

    assert allocated(terabyte) < 1 << 20
    with LiveByteCounter() as live:
        live.watch(*terabyte().parameters())
        assert live.peak > 1 << 40


@pytest.mark.parametrize("name", POLICIES)
def test_trace_truth_and_arithmetic_of_an_update_agree(name):
    known = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = transformers.AutoConfig.for_model("llama", **SIZES, **known)
    policy_config = PolicyConfig(model="-", **POLICIES[name])
    lengths = {"prompts": 1, "rows": 4, "prompt_tokens": 24, "completion_tokens": 16}
    found = {}
    for fake in (True, False):
        policy = fake_policy(config, policy_config, fake=fake)
        assert policy.shares_prompts
        copy = policy._reference[0]
        more = tuple(copy.parameters()) if copy is not None else ()
        one = scored_pass(policy, **lengths)
        found[fake] = trace_update(policy, one, JOB, more=more)
    trained = [weight for weight in policy.parameters() if weight.requires_grad]
    optimizer = create_state(policy, OptimizerConfig()).optimizer

    def step():
        for _ in range(2):
            one().backward()
        optimizer.step()

    step()
    optimizer.zero_grad(set_to_none=True)
    held = sum(t.nbytes for t in (*policy.parameters(), *policy.buffers(), *more)) + 2 * sum(t.nbytes for t in trained)
    truth = held + allocated(step)
    assert found[True] == pytest.approx(truth, rel=0.02)
    assert found[False] == pytest.approx(truth, rel=0.02)
    planned = ChatMemory(
        architecture({"model_type": "llama", **SIZES}),
        24,
        16,
        lora_rank=policy_config.lora_rank,
        checkpointing=policy_config.gradient_checkpointing,
        reference_copies=int(policy_config.reference == "copy"),
    )
    assert sum(planned.stages(JOB).update.values()) == pytest.approx(truth, rel=0.10)


CLIPS = [("all", 1, {}), ("lora", 1, {}), ("all", 2, {"branch": True}), ("lora", 2, {"branch": True})]
CLIPS += [("all", 2, {"checkpointing": True}), ("lora", 1, {"checkpointing": True, "branch": True})]


@pytest.mark.parametrize(("part", "steps", "fields"), CLIPS)
def test_a_video_models_update(part, steps, fields):
    from groupwise.workloads.flow.config import TrainConfig
    from groupwise.workloads.flow.trace import fake_transformer, followed_rollout, stages_of

    sizes = {"_class_name": "WanTransformer3DModel", "num_attention_heads": 2, "attention_head_dim": 32}
    sizes |= {"num_layers": 1, "ffn_dim": 256, "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 32}
    rank = 4 if part == "lora" else None
    memory = FlowMemory(video_model(sizes), (4, 4, 16, 16), steps, text_tokens=8, lora_rank=rank, **fields)
    transformer = fake_transformer(sizes, TrainConfig(part=part, lora_rank=4), checkpointing=memory.checkpointing)
    numbers = sum(weight.numel() for weight in transformer.parameters())
    assert numbers == memory.model.parameters + (memory.model.adapter_numbers(4) if rank else 0)
    job = StepSpec(StepShape(10**6, 2, 2, 1, 2, "whole"), fused=True)
    assert memory.starts(job) == (1 if memory.branch else 2)
    found, planned = stages_of(transformer, memory, job), memory.stages(job)
    update = trace_update(transformer, found.one_pass, job, more=found.held)
    assert sum(planned.update.values()) == pytest.approx(update, rel=0.10)
    assert sum(planned.rollout.values()) == pytest.approx(followed_rollout(transformer, found), rel=0.10)


@pytest.mark.parametrize("kind", ["llama", "olmoe"])
def test_trace_truth_and_arithmetic_of_a_chat_rollout_agree(kind):
    """Two prompts, four rows each, to the last token: the rows' own caches grow once on the way."""
    sizes = SIZES | ({"num_experts": 4, "num_experts_per_tok": 2} if kind == "olmoe" else {})
    config = transformers.AutoConfig.for_model(kind, **sizes, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    lengths, rows = {"prompt_tokens": 24, "completion_tokens": 48}, 8
    policy = fake_policy(config, PolicyConfig(model="-"))
    traced = traced_rollout(policy, followed_rollout(policy, prompts=2, rows=rows, **lengths), rows * 48)
    policy = fake_policy(config, PolicyConfig(model="-"), fake=False)
    group = torch.arange(rows) // 4
    placed = RolloutRows(0, 0, rows, group, torch.arange(rows) % 4, group)
    asked = [[1 + nth for nth in range(24)]] * 2
    held = sum(t.nbytes for t in policy.buffers()) + 3 * sum(t.nbytes for t in policy.parameters())
    said = []
    truth = held + allocated(
        lambda: said.extend(generate(policy, asked, group.tolist(), placed, SamplingParams(max_new_tokens=48)))
    )
    assert {len(each) for each in said} == {48}
    assert traced == pytest.approx(truth, rel=0.02)
    planned = ChatMemory(architecture({"model_type": kind, **sizes}), 24, 48)
    assert sum(planned.stages(JOB).rollout.values()) == pytest.approx(traced, rel=0.10)


@pytest.mark.parametrize("new_tokens", [1, 4])
def test_trace_truth_and_arithmetic_of_a_controllers_pass_agree(new_tokens):
    text = SIZES | {"num_hidden_layers": 8, "num_experts": 4, "num_experts_per_tok": 4, "intermediate_size": 32}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"num_channels": 1, "image_size": 8, "patch_size": 4, "vision_use_head": False}
    config = transformers.LlavaConfig(
        vision_config=transformers.SiglipVisionConfig(**vision),
        text_config=transformers.OlmoeConfig(**text, pad_token_id=0, eos_token_id=1, bos_token_id=None),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
    memory = ControllerMemory(
        architecture({"model_type": "olmoe", **text}),
        vision_of(vision, 64),
        {"low": 2, "high": 5},
        positions=5,
        question_tokens=4,
        options=(2, 5, 3, 3),
        new_tokens=new_tokens,
    )
    found = traced_controller(config, memory, JOB)
    real = fake_controller(config, memory, JOB, fake=False)
    trained = sum(weight.nbytes for weight in real.policy.parameters())
    held = sum(t.nbytes for t in (*real.frozen, *real.policy.buffers())) + 3 * trained
    with torch.no_grad():
        truth = held + allocated(real.rollout)
    assert found["rollout"] == pytest.approx(truth, rel=0.02)
    stages = memory.stages(JOB)
    assert sum(stages.rollout.values()) == pytest.approx(found["rollout"], rel=0.10)
    assert sum(stages.update.values()) == pytest.approx(found["update"], rel=0.10)


@pytest.mark.parametrize(("fused", "of_each"), [(True, 4), (False, 5)])
def test_an_optimizer_that_is_not_fused_holds_one_number_more_of_each(fused, of_each):
    policy, numbers = torch.nn.Linear(100, 100), 100 * 101
    job = replace(JOB, fused=fused)
    found = trace_update(policy, lambda: policy.weight.sum() + policy.bias.sum(), job)
    # weights, gradients and two moments of four bytes each; little besides
    assert found == pytest.approx(4 * of_each * numbers, rel=0.02)
    held = WeightBytes(0, numbers).parts(job)
    assert (
        sum(peak_of_update(held, [{}], WeightBytes(0, numbers).in_step(job), one_pass=False).values())
        == 4 * of_each * numbers
    )


def test_the_allocator_has_nothing_to_hand_out_for_a_fused_step():
    config = OptimizerConfig()
    state = create_state(torch.nn.Linear(1000, 1000), config)

    def step():
        for weight in state.trainable:
            weight.grad.fill_(1.0)
        _apply(state, Config(None, steps=1, optimizer=config), 0)

    for weight in state.trainable:
        weight.grad = torch.zeros_like(weight)
    step()
    assert allocated(step) < 4_000, "of 4 MB of weights"


def test_finished_clips_are_not_counted_on_the_device():
    """They wait in the host's memory: more rollouts change nothing, more clips decoded at a time do."""
    sizes = {"_class_name": "WanTransformer3DModel", "num_attention_heads": 2, "attention_head_dim": 32}
    sizes |= {"num_layers": 1, "ffn_dim": 256, "in_channels": 4, "text_dim": 16}
    for conditions, rows, expected in ((2, 1, 4_000_000), (8, 1, 4_000_000), (8, 4, 16_000_000)):
        memory = FlowMemory(video_model(sizes), (4, 4, 16, 16), 1, pixels=10**6, number_bytes=2, decode_rows=rows)
        job = StepSpec(StepShape(10**6, conditions, 2, 1, 2, "whole"))
        # the decoder's clips and the same within -1..1, in bfloat16: decode_rows x 2 x 10**6 x 2 bytes
        assert memory.stages(job).rollout["decoded frames"] == expected


def test_a_controllers_network_and_its_frozen_model_are_counted_exactly():
    from groupwise.recipes import load_recipe
    from groupwise.workloads.controller.policy.network import ControllerNetwork
    from groupwise.workloads.controller.tasks.mosaic.model import load_mosaic, mosaic_options
    from groupwise.workloads.controller.tasks.mosaic.scene import CROPS, TOKENS_PER_CROP

    memory: ControllerMemory = load_recipe("controller").workload.memory_model()
    assert memory.crops == {tier.value: 1 + count for tier, count in CROPS.items()}
    assert memory.vision.patches == TOKENS_PER_CROP
    model = load_mosaic()
    assert memory.text.parameters + memory.vision.parameters == sum(w.numel() for w in model.parameters())
    policy = ControllerNetwork(memory.text.width, mosaic_options())
    assert memory.policy_numbers == sum(weight.numel() for weight in policy.parameters())


def test_the_embedded_clips_are_planned_as_they_are():
    from groupwise.workloads.flow.tasks.plane.config import CLIP, PROMPT_WORDS
    from groupwise.workloads.flow.tasks.plane.scene import COLOURS, FRAMES, LENGTH, SIDE

    assert (COLOURS, FRAMES, SIDE, SIDE) == CLIP
    assert PROMPT_WORDS == LENGTH
