"""The memory plan against what torch's allocator hands out, for each adapter and the embedded model.

Transformers are wider than in other tests, as plans are for models whose blocks matter more than what is around them.
"""

import json
from dataclasses import replace

import pytest
import torch
from allocator import peak_allocated
from tiny.pipelines import config_of, save_pipeline
from tiny.wan import save_noise_clip, save_tiny_wan, tiny_recam, tiny_wan_transformer

from groupwise.core.placement import RolloutRows
from groupwise.core.shape import StepShape
from groupwise.memory.stages import StepSpec
from groupwise.recipes import load_recipe
from groupwise.workloads.flow.data.cameras import motion_to_pose
from workloads.flow.small import CPU

VIDEO = {"num_attention_heads": 4, "attention_head_dim": 48, "ffn_dim": 768, "num_layers": 2}
IMAGE = {"num_attention_heads": 4, "attention_head_dim": 64, "num_layers": 2}
ROPE = {"axes_dims_rope": (16, 24, 24)}
ADAPTERS = {
    "wan-2.1": (VIDEO, {"frames": 9, "height": 192, "width": 192}),
    "wan-2.2": (VIDEO, {"frames": 9, "height": 192, "width": 192}),
    "wan-2.2-5b": (VIDEO, {"frames": 9, "height": 192, "width": 192}),
    "wan-2.1-i2v": (VIDEO, {"frames": 9, "height": 192, "width": 192}),
    "wan-2.2-i2v": (VIDEO, {"frames": 9, "height": 192, "width": 192}),
    "sd3": ({**IMAGE, "caption_projection_dim": 256, "pos_embed_max_size": 64}, {"height": 128, "width": 128}),
    "flux-dev": ({**IMAGE, **ROPE}, {"height": 96, "width": 96}),
    "qwen-image": ({**IMAGE, **ROPE}, {"height": 192, "width": 192}),
}


def peaks(config, *, groups, members, rows):
    """Of the rollout and of the update's last pass, as `predict` counts them: with weights, moments and latents."""
    workload = config.build(CPU)
    group = torch.arange(groups).repeat_interleave(members)
    placed = RolloutRows(0, 1, rows, group, torch.arange(members).repeat(groups), group)
    workload.conditioning.of(group, CPU)
    weights = list(workload.policy.parameters())
    trained = [weight for weight in weights if weight.requires_grad]
    moments = 2 * sum(weight.nbytes for weight in trained)
    initial = 0 if config.train.part == "lora" else moments // 2
    held = sum(tensor.nbytes for tensor in (*weights, *workload.policy.buffers())) + moments + initial
    rolled = []
    with torch.no_grad():
        rollout = held + peak_allocated(lambda: rolled.append(workload.rollout(placed)))
    for weight in trained:
        weight.grad = torch.zeros_like(weight)  # of the passes before
    (rollouts,) = rolled
    held += moments // 2 + sum(rollouts.data[name].nbytes for name in ("window_latents", "latents"))
    last = rollouts.select(list(workload.passes(rollouts, rows))[-1])

    def update():
        for score in workload.score_parts(last):
            score().logp.exp().mean().backward()

    return {"rollout": rollout, "update": held + peak_allocated(update)}


def assert_planned(config, **shape):
    spec = StepSpec(
        StepShape(10**6, shape["groups"], shape["members"], 1, shape["rows"], "whole"), fused_optimizer=True
    )
    memory = replace(config.memory_model(), pixels=0)  # decoding comes with the rewards, which are not measured here
    planned, measured = memory.predict(spec), peaks(config, **shape)
    assert sum(planned.rollout.values()) == pytest.approx(measured["rollout"], rel=0.10)
    assert sum(planned.update.values()) == pytest.approx(measured["update"], rel=0.10)


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_plan_of_an_adapter_is_within_a_tenth_of_the_allocator(tmp_path, name):
    transformer, size = ADAPTERS[name]
    folder = save_pipeline(name, tmp_path, **transformer)
    prompt = "a cat " * 100  # as long as Qwen-Image takes it, which cuts text to the longest prompt
    (folder / "rows.jsonl").write_text(2 * (json.dumps({"prompt": prompt, "video": "image.png"}) + "\n"))
    config = config_of(folder, name, encode_rows=1, negative_prompt=prompt, **size)
    assert_planned(config, groups=2, members=2, rows=2)


def test_the_plan_of_camera_layers_is_within_a_tenth_of_the_allocator(tmp_path):
    save_tiny_wan(tmp_path / "pipeline", transformer=tiny_wan_transformer(**VIDEO))
    save_noise_clip(tmp_path / "clip.npy", 9)
    camera = motion_to_pose(torch.zeros(3, 6)).tolist()
    (tmp_path / "rows.jsonl").write_text(2 * (json.dumps({"prompt": "", "video": "clip.npy", "camera": camera}) + "\n"))
    size = {"frames": 9, "height": 128, "width": 128, "encode_rows": 1, "reference": False}
    assert_planned(tiny_recam(tmp_path / "pipeline", tmp_path / "rows.jsonl", **size), groups=2, members=2, rows=2)


def test_the_plan_of_the_embedded_model_is_within_a_tenth_of_the_allocator():
    assert_planned(load_recipe("flow").workload, groups=2, members=8, rows=8)
