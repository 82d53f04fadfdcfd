"""Each adapter denoises exactly as its pipeline does; its ratio is 1; adapters are chosen by the pipeline's class."""

import json
from dataclasses import replace

import diffusers
import pytest
import torch
from diffusers import UniPCMultistepScheduler
from PIL import Image
from tiny.pipelines import PIPELINES, STEPS, config_of
from tiny.wan import save_tiny_wan
from torch.testing import assert_close

import groupwise as gw
from groupwise.core.io.files import read_jsonl
from groupwise.core.placement import RolloutRows
from groupwise.recipes import load_recipe
from groupwise.workloads.flow.sampling.schedule import WindowConfig
from workloads.flow.small import CPU


def call_of(name, folder, latents):
    """What the pipeline itself is called with, for the same latents."""
    call = {"prompt": "a cat", "negative_prompt": "blurry", "height": 16, "width": 16, "output_type": "latent"}
    call |= {"num_inference_steps": STEPS, "latents": latents, "guidance_scale": 3.0}
    if name.startswith("wan"):
        call |= {"num_frames": 5}
    if name.startswith("wan-2.2") and "5b" not in name:
        call |= {"guidance_scale_2": 2.0}
    if "i2v" in name:
        call |= {"image": Image.open(folder / "image.png")}
    if name.startswith("flux"):
        call |= {"guidance_scale": 3.5, "true_cfg_scale": 3.0}
    if name == "qwen-image":
        call |= {"guidance_scale": None, "true_cfg_scale": 3.0}
    return call


def packed(name, latents):
    from groupwise.workloads.flow.models.image import pack

    return pack(latents) if name.startswith(("flux", "qwen")) else latents


@pytest.mark.parametrize("name", PIPELINES)
def test_an_adapter_denoises_as_its_pipeline_does(folders, name):
    folder = folders(name)
    workload = config_of(folder, name).build(CPU)
    noise = torch.randn(1, *workload.latent_shape, generator=torch.Generator().manual_seed(2))
    velocity = workload.velocity(workload.conditioning, torch.tensor([0]))
    denoiser = replace(workload.denoiser(STEPS), window=range(STEPS, STEPS))
    with torch.no_grad():
        ours = denoiser.denoise_to_window(noise, velocity)
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder / "pipeline")
    pipeline.set_progress_bar_config(disable=True)
    with torch.no_grad():
        call = call_of(name, folder, packed(name, noise))
        if "i2v" in name:  # it cleans prompts with a package that is not required
            text = workload.conditioning.of(torch.tensor([0]), CPU)
            call |= {"prompt": None, "prompt_embeds": text["text"]}
            call |= {"negative_prompt": None, "negative_prompt_embeds": text["negative_text"]}
        theirs = pipeline(**call, return_dict=False)[0]
    difference = (packed(name, ours) - theirs).abs().max().item()
    rounded = ("sd3", "wan-2.2-5b")  # guides in one batch of another order; has a timestep per row, not per token
    assert difference == (pytest.approx(0, abs=3e-6) if name in rounded else 0)
    assert workload.denoiser(STEPS).levels == pipeline.scheduler.sigmas.tolist()
    assert (ours - noise).abs().max() > 0.1


@pytest.mark.parametrize("name", PIPELINES)
def test_before_an_update_the_ratio_is_one_and_gradients_arrive(folders, name, tmp_path):
    folder = folders(name)
    config = gw.Config(
        config_of(folder, name, reference=True),
        steps=2,
        conditions_per_step=2,
        group_size=2,
        rows_per_pass=2,
        loss=gw.LossConfig(clip_low=1e-4, clip_high=1e-4, kl=0.01),
        optimizer=gw.OptimizerConfig(learning_rate=1e-2),
        run=gw.RunConfig(run_dir=tmp_path),
    )
    gw.train(config)  # preflight looks at the ratio and at the gradients
    first, second = read_jsonl(tmp_path / "metrics.jsonl")
    assert first["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert first["kl"] == 0
    assert second["kl"] > 0 or name.startswith("wan-2.2")  # the second step may train the other transformer


def test_wan_2_2_trains_each_transformer_at_its_own_noise_levels(folders):
    config, high, low = config_of(folders("wan-2.2"), "wan-2.2"), "transformer", "transformer_2"
    config = replace(config, sampling=replace(config.sampling, num_inference_steps=4, window=WindowConfig(share=1)))
    workload = config.build(CPU)
    levels = workload.levels
    assert [1000 * level >= 875 for level in levels[:-1]] == [True, True, False, False]
    for step, (used, idle) in enumerate([({high}, [low]), ({high, low}, [])]):
        rows = RolloutRows(0, step, 4, *(torch.tensor(numbers) for numbers in ([0, 0], [0, 1], [0, 0])))
        with torch.no_grad():
            rollouts = workload.rollout(rows)
        scored = workload.score(rollouts)
        assert torch.equal(scored.logp, rollouts.logp)
        workload.policy.zero_grad(set_to_none=True)
        scored.logp.sum().backward()
        assert workload.idle_parts(rollouts) == idle
        gradients = [(name, w.grad) for name, w in workload.policy.named_parameters() if w.grad is not None]
        assert {name.split(".")[0] for name, gradient in gradients if gradient.any()} == used
    assert workload.model.idle_parts([levels[2]]) == [high]
    # rows of one pass at noise levels of both: each from its own transformer
    latents, sigma = torch.randn(2, *workload.latent_shape), torch.tensor([levels[0], levels[2]])
    both = workload.velocity(workload.conditioning, torch.tensor([0, 0]))(latents, sigma)
    for row in range(2):
        alone = workload.velocity(workload.conditioning, torch.tensor([0]))(
            latents[row : row + 1], sigma[row : row + 1]
        )
        assert_close(both[row : row + 1], alone, rtol=0, atol=1e-5)


def test_a_transformer_that_no_window_reaches_is_told(folders):
    config = config_of(folders("wan-2.2"), "wan-2.2")
    half = replace(config, sampling=replace(config.sampling, num_inference_steps=20, window=WindowConfig()))
    (warning,) = half.build(CPU).reporter.start_warnings()
    assert warning.startswith("transformer_2 is never trained: it takes none of the first 10 of 20 denoising steps")
    whole = replace(half, sampling=replace(half.sampling, window=load_recipe("flow-wan").workload.sampling.window))
    assert whole.build(CPU).reporter.start_warnings() == []


def test_the_schedule_is_the_pipelines_own_and_a_shift_replaces_it(folders):
    """SD3's scheduler shifts its last level twice: 0.0089 at shift 3, where equal steps would end at 0.25."""
    config = config_of(folders("sd3"), "sd3")
    assert config.build(CPU).denoiser(10).levels[-2] == pytest.approx(0.0089, abs=1e-4)
    shifted = replace(config, sampling=replace(config.sampling, shift=3.0)).build(CPU)
    assert shifted.denoiser(10).levels[-2] == pytest.approx(0.25)


def test_timesteps_are_rounded_where_the_scheduler_rounds_them(tmp_path):
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0)
    save_tiny_wan(tmp_path / "pipeline", scheduler=scheduler)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a cat"}\n')
    workload = config_of(tmp_path, "wan").build(CPU)
    levels = workload.denoiser(STEPS).levels
    assert levels[0] == pytest.approx(0.999999, abs=1e-7)
    seen = []
    workload.policy.register_forward_pre_hook(lambda _, __, inputs: seen.append(inputs["timestep"]), with_kwargs=True)
    rows = RolloutRows(0, 0, 1, *(torch.tensor([0]) for _ in range(3)))
    with torch.no_grad():
        rollouts = workload.rollout(rows)
    scheduler.set_timesteps(STEPS)
    assert [int(step) for step in torch.cat(seen)[::2]] == scheduler.timesteps.tolist()
    assert rollouts.data["window_latents"][:, 1].abs().max() < 20  # the first step is one from noise


def test_text_has_the_length_that_the_pipeline_gives_it(folders):
    assert config_of(folders("wan-2.1"), "wan-2.1").build(CPU).conditioning.of(torch.tensor([0]), CPU)[
        "text"
    ].shape == (1, 512, 16)


def test_prompts_of_different_lengths_do_not_change_each_other(folders):
    workload = config_of(folders("qwen-image"), "qwen-image").build(CPU)
    latents, sigma = torch.randn(2, *workload.latent_shape), torch.tensor([0.7, 0.7])
    with torch.no_grad():
        both = workload.velocity(workload.conditioning, torch.tensor([0, 1]))(latents, sigma)
        alone = workload.velocity(workload.conditioning, torch.tensor([0]))(latents[:1], sigma[:1])
    assert_close(both[:1], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "wan-2.1",
            {"_class_name": "LTXPipeline"},
            "holds a LTXPipeline, and this recipe trains WanImageToVideoPipeline or",
        ),
        ("wan-2.2", {"boundary_ratio": None}, "has boundary_ratio None and transformer and transformer_2"),
        ("wan-2.1", {"boundary_ratio": 0.9}, "has boundary_ratio 0.9 and transformer: "),
        ("wan-2.1-i2v", {"expand_timesteps": True}, "a timestep per token"),
    ],
)
def test_pipelines_that_are_not_known_are_refused(folders, tmp_path, name, changes, message):
    folder = folders(name) / "pipeline"
    for part in folder.iterdir():
        (tmp_path / part.name).symlink_to(part)
    index = tmp_path / "model_index.json"
    content = {**json.loads(index.read_text()), **changes}
    index.unlink()
    index.write_text(json.dumps(content))
    config = config_of(folders(name), name)
    with pytest.raises(gw.UserError, match=message):
        replace(config, pipeline=tmp_path).build(CPU)
