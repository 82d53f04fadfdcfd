"""Pipelines of diffusers' real classes, tiny and random, trained from folders and files; and what is refused."""

import json
import math
from dataclasses import replace

import pytest
import torch
from tiny.sd3 import tiny_sd3
from tiny.wan import save_noise_clip, tiny_recam
from torch.testing import assert_close

import groupwise as gw
from groupwise.core.io.files import read_jsonl
from groupwise.core.placement import RolloutRows
from groupwise.data.rows import RowFilter
from groupwise.recipes import load_recipe
from groupwise.rewards.config import RewardFunctionsConfig
from groupwise.workloads.flow.config import TrainedPartsConfig
from groupwise.workloads.flow.data.cameras import motion_to_pose
from groupwise.workloads.flow.data.rows import read_conditions
from groupwise.workloads.flow.tasks.pipelines import ImageConfig
from workloads.flow.small import CPU


def test_a_wan_folder_trains_from_files(wan, data, tmp_path):
    config = gw.Config(
        tiny_recam(wan, data),
        steps=2,
        conditions_per_step=2,
        group_size=2,
        rows_per_pass=2,
        loss=gw.LossConfig(clip_low=1e-4, clip_high=1e-4, kl=0.01),
        optimizer=gw.OptimizerConfig(learning_rate=1e-2, ema_decay=0.9),
        run=gw.RunConfig(run_dir=tmp_path),
    )
    gw.train(config)
    first, second = read_jsonl(tmp_path / "metrics.jsonl")
    assert first["kl"] == 0
    assert second["kl"] > 0
    assert first["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    saved = (tmp_path / "checkpoints" / "step-000002" / "policy.safetensors").stat().st_size
    assert saved < 60_000  # the adapter alone


def test_bfloat16_weights_still_have_a_ratio_of_one(wan, data):
    workload = tiny_recam(wan, data, dtype="bfloat16").build(CPU)
    assert {weight.dtype for weight in workload.policy.parameters() if weight.requires_grad} == {torch.float32}
    numbers = torch.tensor([0, 0, 2, 2])
    with torch.no_grad():
        rollouts = workload.rollout(RolloutRows(0, 1, 4, numbers, torch.tensor([0, 1, 0, 1]), numbers))
    assert rollouts.logp.dtype == torch.float32
    assert torch.equal(workload.score(rollouts).logp, rollouts.logp)


def test_conditions_with_one_prompt_and_several_cameras_are_several_groups(wan, data):
    workload = tiny_recam(wan, data).build(CPU)
    assert len(workload.group_ids.unique()) == 4
    conditions = read_conditions(str(data), RowFilter("refuse", "--workload.on-bad-row"))
    assert [condition.reward_columns["weight"] for condition in conditions] == [0, 1, 2, 3]
    assert_close(conditions[3].camera, motion_to_pose(torch.linspace(0, 0.3, 12).view(2, 6)))


def test_sd3_makes_images_from_prompts(sd3):
    config = tiny_sd3(sd3)
    workload = config.build(CPU)
    assert workload.latent_shape == (4, 8, 8)
    with torch.no_grad():
        rollouts = workload.rollout(
            RolloutRows(0, 0, 4, *(torch.tensor(numbers) for numbers in ([0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 1, 1])))
        )
    scored = workload.score(rollouts)
    assert torch.equal(scored.logp, rollouts.logp)
    assert workload.rewards(rollouts).per_rollout["warmth"].isfinite().all()
    assert workload.decode(rollouts.data["latents"]).shape == (4, 3, 16, 16)
    scored.logp.sum().backward()
    assert any(weight.grad is not None and weight.grad.any() for weight in workload.policy.parameters())
    with pytest.raises(gw.UserError, match=r"workload\.width is 17"):
        replace(config, width=17).build(CPU)


def test_the_recipe_for_images_trains_a_pipeline_folder(sd3, tmp_path):
    """As `groupwise train flow-sd3` does it, with fewer prompts, members and steps."""
    config = load_recipe("flow-sd3")
    assert config.shape(conditions=1000, ranks=8).passes == 4
    workload = replace(config.workload, sampling=replace(config.workload.sampling, num_inference_steps=4))
    for name in ("pipeline", "data", "rewards", "height", "width", "dtype", "train"):
        workload = replace(workload, **{name: getattr(tiny_sd3(sd3), name)})
    run = gw.RunConfig(run_dir=tmp_path, preflight=False)
    shape = {"conditions_per_step": 2, "group_size": 4, "rows_per_pass": 4, "steps": 2}
    gw.train(replace(config, workload=workload, run=run, **shape))
    first, second = read_jsonl(tmp_path / "metrics.jsonl")
    assert first["ratio_max"] == first["ratio_min"] == 1
    assert first["kl"] == 0
    assert second["kl"] > 0
    assert second["trained_rollouts"] == 8


@pytest.mark.parametrize("kind", ["wan", "sd3"])
def test_gradient_checkpointing_recomputes_blocks_and_has_the_same_gradient(request, data, kind):
    folder = request.getfixturevalue(kind)
    config = tiny_recam(folder, data) if kind == "wan" else tiny_sd3(folder)
    numbers = torch.tensor([0, 0, 1, 1])
    rows = RolloutRows(0, 1, 4, numbers, torch.tensor([0, 1, 0, 1]), numbers)
    gradients, passes = [], []
    for checkpointing in (False, True):
        workload = replace(config, gradient_checkpointing=checkpointing).build(CPU)
        blocks = workload.policy.blocks if kind == "wan" else workload.policy.transformer_blocks
        for name, weight in workload.policy.named_parameters():
            if "lora_B" in name:  # zero at first: the other half would have no gradient
                torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(len(name)))
        with torch.no_grad():
            rollouts = workload.rollout(rows)
        forward_grad = []
        blocks[-1].register_forward_pre_hook(lambda *_, modes=forward_grad: modes.append(torch.is_grad_enabled()))
        scored = workload.score(rollouts)
        assert torch.equal(scored.logp, rollouts.logp)
        (scored.logp.sum() + scored.kl.sum()).backward()
        passes.append(sum(forward_grad))
        gradients.append({name: w.grad for name, w in workload.policy.named_parameters() if w.requires_grad})
    # and those of the reference, without gradient; wan's prompt and negative prompt are apart
    assert passes == ([2, 4] if kind == "wan" else [1, 2])
    assert gradients[0].keys() == gradients[1].keys()
    assert any(gradient.abs().max() > 0 for gradient in gradients[0].values())
    for name, gradient in gradients[0].items():
        assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-9)


BAD = [
    ({"frames": 6}, "workload.frames is 6.*Take 5 or 9"),
    ({"height": 0}, "workload.height is 0: .*at least 1"),
    ({"frames": 9}, "has 5 frames .* it needs 9"),
    ({"height": 20}, "workload.height is 20.*Take 16 or 24"),
    ({"height": 24}, "height is 3, which the transformer's patches of 2 do not divide.*2 or 4"),
    ({"rewards": RewardFunctionsConfig()}, "nothing to learn from"),
    ({"data": None}, "workload.data is not given"),
    ({"train": TrainedPartsConfig(lora_targets=("nothing",))}, "no layer of WanTransformer3DModel"),
    ({"train": TrainedPartsConfig("recam"), "dtype": "bfloat16"}, "is in bfloat16: small updates would be rounded"),
]


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_settings_that_do_not_fit_are_refused_before_anything_runs(wan, data, settings, message):
    with pytest.raises(gw.UserError, match=message):
        tiny_recam(wan, data, **settings).build(CPU)


def test_other_folders_are_refused(wan, data, tmp_path):
    with pytest.raises(gw.UserError, match=r"no model_index\.json"):
        tiny_recam(tmp_path, data).build(CPU)
    with pytest.raises(
        gw.UserError, match="holds a WanPipeline, and this recipe trains FluxPipeline or QwenImagePipeline or Stable"
    ):
        ImageConfig(
            pipeline=wan, data=data, rewards=RewardFunctionsConfig(functions=("w=workloads.flow.small:warmth",))
        ).build(CPU)


def test_cameras_of_the_wrong_length_or_with_nan_are_refused(wan, data, tmp_path):
    save_noise_clip(tmp_path / "clip.npy", 5)
    for frames, has_nan, message in ((3, False, "has 3 poses for 2 frames"), (2, True, "holds nan in frame")):
        path = motion_to_pose(torch.zeros(frames, 6))
        if has_nan:
            path[1, 3] = math.nan
        line = json.dumps({"prompt": "", "video": "clip.npy", "camera": path.tolist()})
        (tmp_path / "lines.jsonl").write_text(line)
        with pytest.raises(gw.UserError, match=message):
            tiny_recam(wan, tmp_path / "lines.jsonl").build(CPU)


def test_bad_rows_are_skipped_and_counted(wan, data):
    lines = data.with_name("lines.jsonl")
    lines.write_text(data.read_text() + '{"prompt": "", "video": "nowhere.gif"}\n{\n')
    with pytest.raises(gw.UserError, match=r"line 6: it is not JSON .*set --workload.on-bad-row to 'skip'"):
        tiny_recam(wan, lines).build(CPU)
    workload = tiny_recam(wan, lines, on_bad_row="skip").build(CPU)
    assert workload.num_conditions == 4
    assert "rows of data skipped: 1 broken line, 1 without a video; 4 are left" in workload.reporter.preflight_notes()
