"""Adapters over diffusers' real classes, tiny and random, saved and loaded as pipeline folders."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from safetensors.torch import save_file
from torch.testing import assert_close

import groupwise as gw
from groupwise.core.placement import Rows
from groupwise.recipes import load_recipe
from groupwise.train.folder import read_lines
from groupwise.workloads.flow.cameras import poses_of
from groupwise.workloads.flow.conditions import Condition
from groupwise.workloads.flow.dataset import read_clip, read_conditions
from groupwise.workloads.flow.models.camera_layers import add_camera_layers, camera_velocity, camera_weights
from groupwise.workloads.flow.models.folder import visiting
from groupwise.workloads.flow.models.wan import ClipSize, WanCameraModel
from groupwise.workloads.flow.pipelines import RecamConfig, Sd3Config
from groupwise.workloads.flow.schedule import SamplingConfig, WindowConfig
from groupwise.workloads.flow.training_parts import TrainConfig
from workloads.flow.small import CPU
from workloads.flow.tiny_folders import clip_file, sd3_folder, wan_folder

SIZE = ClipSize(frames=5, height=16, width=16)  # 2 latent frames of 2 x 2
LORA = TrainConfig(lora_rank=2, lora_alpha=4)


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    return wan_folder(tmp_path_factory.mktemp("wan"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Four conditions: one prompt, one clip, four cameras."""
    folder = tmp_path_factory.mktemp("data")
    clip_file(folder / "clip.npy", 5)
    lines = []
    for nth in range(4):
        np.save(folder / f"camera{nth}.npy", poses_of(torch.linspace(0, 0.1 * nth, 12).view(2, 6)).numpy())
        lines.append({"prompt": "a cat by the sea", "video": "clip.npy", "camera": f"camera{nth}.npy", "weight": nth})
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "train.jsonl"


def model(folder, **settings):
    return WanCameraModel(folder, SIZE, train=settings.pop("train", LORA), device=CPU, dtype="float32", **settings)


def condition(nth=0):
    source = torch.linspace(-1, 1, 3 * 5 * 16 * 16).view(3, 5, 16, 16)
    return Condition("a cat", source, poses_of(torch.full((2, 6), 0.1 * nth) * torch.tensor([[0.0], [1.0]])))


def test_fresh_camera_layers_change_nothing_and_trained_ones_do(wan):
    base = WanTransformer3DModel.from_pretrained(wan, subfolder="transformer").eval()
    latents, source, camera = torch.randn(2, 16, 2, 2, 2), torch.randn(2, 16, 2, 2, 2), torch.randn(2, 2, 12)
    text, when = torch.randn(2, 7, 16), torch.tensor([900.0, 100.0])
    with torch.no_grad():
        plain = base(torch.cat([latents, source], dim=2), when, text, return_dict=False)[0][:, :, :2]
        names = set(base.state_dict())
        add_camera_layers(base)
        assert torch.equal(camera_velocity(base, latents, when, text, source, camera), plain)
        assert names < set(base.state_dict())  # the base weights keep their names
        assert len(camera_weights(base)) == 2 * 4
        base.blocks[0].attn1.processor.pose_encoder.weight.normal_(std=0.5)
        moved = camera_velocity(base, latents, when, text, source, camera)
    assert not torch.allclose(moved, plain)
    base.enable_gradient_checkpointing()
    base.train()
    again = camera_velocity(base, latents, when, text, source, camera)
    assert_close(again, moved)
    again.sum().backward()
    assert base.blocks[0].attn1.processor.pose_encoder.weight.grad.any()


def test_encodings_are_those_of_the_pipeline_and_its_parts_stay_off_the_device(wan):
    ours = model(wan, negative_prompt="blurry")
    (encoding,) = ours.encode([condition()])
    pipeline = WanPipeline.from_pretrained(wan)
    with torch.no_grad():
        given, without = pipeline.encode_prompt(["a cat"], ["blurry"], device=CPU)
        latents = pipeline.vae.encode(condition().source[None]).latent_dist.mode()
    assert_close(encoding["text"], given[0])
    assert_close(encoding["unprompted_text"], without[0])
    mean, std = (
        torch.tensor(getattr(pipeline.vae.config, name)).view(1, -1, 1, 1, 1)
        for name in ("latents_mean", "latents_std")
    )
    assert_close(encoding["source"], ((latents - mean) / std)[0])
    assert ours.pipeline.transformer is None
    assert ours.asked.latent == (16, 2, 2, 2)
    clip = ours.decode(encoding["source"][None])
    assert clip.shape == (1, 3, 5, 16, 16)
    with torch.no_grad():
        assert_close(clip, pipeline.vae.decode(latents).sample.clamp(-1, 1), rtol=0, atol=1e-4)


class Traveller(torch.nn.Module):
    """Notes where it was sent."""

    def __init__(self):
        super().__init__()
        self.places = []

    def to(self, place):
        self.places.append(str(place))
        return self


def test_what_visits_the_device_leaves_it_even_when_its_work_fails():
    part = Traveller()

    def work():
        with visiting(torch.device("meta"), part, None):
            assert part.places == ["meta"]
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        work()
    assert part.places == ["meta", "cpu"]


def test_lora_trains_alone_and_the_reference_is_the_adapter_switched_off(wan):
    ours = model(wan)
    trained = [name for name, weight in ours.policy.named_parameters() if weight.requires_grad]
    assert trained
    assert all("lora" in name for name in trained)
    assert any("pose_encoder" in name for name in trained)
    encoding = {
        name: column[None] for name, column in ours.encode([condition(1)])[0].items() if "unprompted" not in name
    }
    latents, sigma = torch.randn(1, 16, 2, 2, 2), torch.tensor([0.5])
    first = ours.velocity(latents, sigma, encoding).detach()
    with torch.no_grad():
        for name, weight in ours.policy.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
    present = ours.velocity(latents, sigma, encoding)
    assert not torch.allclose(present, first)
    with torch.no_grad(), ours.reference():
        assert_close(ours.velocity(latents, sigma, encoding), first)
    present.sum().backward()  # the graph outlives the switch
    assert all(weight.grad is not None for weight in ours.policy.parameters() if weight.requires_grad)
    same = model(wan)
    theirs = dict(same.policy.named_parameters())
    assert all(torch.equal(theirs[name], w) for name, w in ours.policy.named_parameters() if "lora_A" in name)


@pytest.mark.parametrize("part", ["camera", "all"])
def test_other_parts_have_the_first_weights_as_their_reference(wan, part):
    ours = model(wan, train=TrainConfig(part))
    trained = [weight for weight in ours.policy.parameters() if weight.requires_grad]
    expected = camera_weights(ours.policy) if part == "camera" else dict(ours.policy.named_parameters())
    assert len(trained) == len(expected)
    before = [weight.detach().clone() for weight in trained]
    with torch.no_grad():
        for weight in trained:
            weight.add_(0.1)
        after = [weight.clone() for weight in trained]
        with ours.reference():
            assert all(torch.equal(weight, first) for weight, first in zip(trained, before, strict=True))
    assert all(torch.equal(weight, moved) for weight, moved in zip(trained, after, strict=True))


def test_camera_layers_are_read_from_a_file(wan, tmp_path):
    saved = {
        name: torch.full_like(weight, 0.25)
        for name, weight in camera_weights(model(wan, train=TrainConfig("camera")).policy).items()
    }
    save_file(saved, tmp_path / "camera.safetensors")
    read = model(wan, train=TrainConfig("camera"), camera_layers=tmp_path / "camera.safetensors")
    assert all((weight == 0.25).all() for weight in camera_weights(read.policy).values())
    save_file({"other": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(gw.UserError, match="does not hold the camera layers"):
        model(wan, camera_layers=tmp_path / "other.safetensors")


def recam(wan, lines, **settings):
    sampling = SamplingConfig(steps=3, guidance=2.0, storage="bfloat16", window=WindowConfig("moving", 1.0, size=1))
    defaults = {"pipeline": wan, "data": lines, "rewards": ("warmth=workloads.flow.small:warmth",), "train": LORA}
    sizes = {"frames": 5, "height": 16, "width": 16, "dtype": "float32"}
    return RecamConfig(sampling, **{"reference": True, **defaults, **sizes, **settings})


def test_a_wan_folder_trains_from_files(wan, data, tmp_path):
    config = gw.Config(
        recam(wan, data),
        steps=2,
        conditions_per_step=2,
        group_size=2,
        rows_per_pass=2,
        loss=gw.LossConfig(clip_low=1e-4, clip_high=1e-4, kl=0.01),
        optimiser=gw.OptimiserConfig(learning_rate=1e-2, ema_decay=0.9),
        run=gw.RunConfig(run_dir=tmp_path),
    )
    gw.train(config)
    first, second = read_lines(tmp_path / "metrics.jsonl")
    assert first["kl"] == 0
    assert second["kl"] > 0
    assert first["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    saved = (tmp_path / "checkpoints" / "step-000002" / "policy.safetensors").stat().st_size
    assert saved < 60_000  # the adapter alone


def test_bfloat16_weights_still_have_a_ratio_of_one(wan, data):
    workload = recam(wan, data, dtype="bfloat16").build(CPU)
    assert {weight.dtype for weight in workload.policy.parameters() if weight.requires_grad} == {torch.float32}
    numbers = torch.tensor([0, 0, 2, 2])
    with torch.no_grad():
        rollouts = workload.rollout(Rows(0, 1, 4, numbers, torch.tensor([0, 1, 0, 1]), numbers))
    assert rollouts.logp.dtype == torch.float32
    assert torch.equal(workload.score(rollouts).logp, rollouts.logp)


def test_conditions_with_one_prompt_and_several_cameras_are_several_groups(wan, data):
    workload = recam(wan, data).build(CPU)
    assert len(workload.group_ids.unique()) == 4
    conditions = read_conditions(data)
    assert [each.columns["weight"] for each in conditions] == [0, 1, 2, 3]
    assert_close(conditions[3].camera[0], torch.eye(3, 4).flatten())


@pytest.fixture(scope="module")
def sd3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sd3")
    sd3_folder(folder / "pipeline")
    (folder / "prompts.jsonl").write_text('{"prompt": "a cat"}\n{"prompt": "a dog by the sea"}\n')
    return folder


def pictures(sd3, **settings):
    defaults = {"pipeline": sd3 / "pipeline", "data": sd3 / "prompts.jsonl", "train": LORA, "reference": True}
    sizes = {"height": 16, "width": 16, "dtype": "float32"}
    sampling = SamplingConfig(steps=3, guidance=3.0, window=WindowConfig("moving", 1.0, size=1))
    return Sd3Config(sampling, rewards=("warmth=workloads.flow.small:warmth",), **{**defaults, **sizes, **settings})


def test_sd3_makes_pictures_from_prompts(sd3):
    config = pictures(sd3)
    workload = config.build(CPU)
    assert workload.shape == (4, 8, 8)
    with torch.no_grad():
        rollouts = workload.rollout(
            Rows(0, 0, 4, *(torch.tensor(each) for each in ([0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 1, 1])))
        )
    scored = workload.score(rollouts)
    assert torch.equal(scored.logp, rollouts.logp)
    assert workload.rewards(rollouts).values["warmth"].isfinite().all()
    assert workload.decode(rollouts.data["latents"]).shape == (4, 3, 16, 16)
    scored.logp.sum().backward()
    assert any(weight.grad is not None and weight.grad.any() for weight in workload.policy.parameters())
    with pytest.raises(gw.UserError, match=r"workload\.width is 17"):
        replace(config, width=17).build(CPU)


def test_the_recipe_for_pictures_trains_a_pipeline_folder(sd3, tmp_path):
    """As `groupwise train flow-sd3` does it, with fewer prompts, members and steps."""
    config = load_recipe("flow-sd3")
    assert config.shape(conditions=1000, ranks=8).passes == 4
    workload = replace(config.workload, sampling=replace(config.workload.sampling, steps=4))
    for name in ("pipeline", "data", "rewards", "height", "width", "dtype", "train"):
        workload = replace(workload, **{name: getattr(pictures(sd3), name)})
    run = gw.RunConfig(run_dir=tmp_path, preflight=False)
    shape = {"conditions_per_step": 2, "group_size": 4, "rows_per_pass": 4, "steps": 2}
    gw.train(replace(config, workload=workload, run=run, **shape))
    first, second = read_lines(tmp_path / "metrics.jsonl")
    assert first["ratio_max"] == first["ratio_min"] == 1
    assert first["kl"] == 0
    assert second["kl"] > 0
    assert second["trained_rollouts"] == 8


@pytest.mark.parametrize("kind", ["wan", "sd3"])
def test_gradient_checkpointing_computes_blocks_again_and_has_the_same_gradient(request, data, kind):
    folder = request.getfixturevalue(kind)
    config = recam(folder, data) if kind == "wan" else pictures(folder)
    numbers = torch.tensor([0, 0, 1, 1])
    rows = Rows(0, 1, 4, numbers, torch.tensor([0, 1, 0, 1]), numbers)
    gradients, passes = [], []
    for switched in (False, True):
        workload = replace(config, gradient_checkpointing=switched).build(CPU)
        blocks = workload.policy.blocks if kind == "wan" else workload.policy.transformer_blocks
        for name, weight in workload.policy.named_parameters():
            if "lora_B" in name:  # zero at first: the other half would have no gradient
                torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(len(name)))
        with torch.no_grad():
            rollouts = workload.rollout(rows)
        seen = []
        blocks[-1].register_forward_pre_hook(lambda *_, seen=seen: seen.append(torch.is_grad_enabled()))
        scored = workload.score(rollouts)
        assert torch.equal(scored.logp, rollouts.logp)
        (scored.logp.sum() + scored.kl.sum()).backward()
        passes.append(sum(seen))
        gradients.append({name: w.grad for name, w in workload.policy.named_parameters() if w.requires_grad})
    assert passes == [1, 2]  # and one of the reference, without gradient
    assert gradients[0].keys() == gradients[1].keys()
    assert any(gradient.abs().max() > 0 for gradient in gradients[0].values())
    for name, gradient in gradients[0].items():
        assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-9)


BAD = [
    ({"frames": 6}, "workload.frames is 6.*Take 5 or 9"),
    ({"frames": 9}, "has 5 frames .* it needs 9"),
    ({"height": 20}, "workload.height is 20.*Take 16 or 24"),
    ({"height": 24}, "height is 3, which the transformer's patches of 2 do not divide.*2 or 4"),
    ({"rewards": ()}, "nothing to learn from"),
    ({"data": None}, "workload.data is not given"),
    ({"train": TrainConfig(lora_targets=("nothing",))}, "no layer of WanTransformer3DModel"),
]


@pytest.mark.parametrize(("settings", "said"), BAD)
def test_what_does_not_fit_is_refused_before_anything_runs(wan, data, settings, said):
    with pytest.raises(gw.UserError, match=said):
        recam(wan, data, **settings).build(CPU)


def test_other_folders_are_refused(wan, data, tmp_path):
    with pytest.raises(gw.UserError, match=r"no model_index\.json"):
        recam(tmp_path, data).build(CPU)
    with pytest.raises(
        gw.UserError, match="holds a WanPipeline, but this model is loaded from a StableDiffusion3Pipeline"
    ):
        Sd3Config(pipeline=wan, data=data, rewards=("w=workloads.flow.small:warmth",)).build(CPU)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not JSON"),
        ('{"video": "clip.npy"}', "has no prompt"),
        ('{"prompt": "", "video": "nowhere.gif"}', "There is no video"),
        ('{"prompt": "", "video": "clip.mp4"}', r"clip\.mp4 cannot be read .*ffmpeg -i clip\.mp4 clip/%05d\.png"),
        ('{"prompt": "", "camera": "nowhere.npy"}', "cannot be read"),
        ('{"prompt": "", "camera": [[1, 2], [3]]}', "cannot be read"),
        ("", "holds no condition"),
    ],
)
def test_lines_that_are_no_conditions_are_refused(tmp_path, line, said):
    (tmp_path / "lines.jsonl").write_text(line + "\n")
    (tmp_path / "clip.mp4").write_bytes(b"\0\0\0\x20ftypisom")
    with pytest.raises(gw.UserError, match=said):
        read_conditions(tmp_path / "lines.jsonl")


def test_cameras_of_the_wrong_length_or_with_nan_are_refused(wan, data, tmp_path):
    clip_file(tmp_path / "clip.npy", 5)
    for frames, hole, said in ((3, False, "has 3 poses for 2 frames"), (2, True, "holds nan in frame")):
        path = poses_of(torch.zeros(frames, 6))
        if hole:
            path[1, 3] = math.nan
        line = json.dumps({"prompt": "", "video": "clip.npy", "camera": path.tolist()})
        (tmp_path / "lines.jsonl").write_text(line)
        with pytest.raises(gw.UserError, match=said):
            recam(wan, tmp_path / "lines.jsonl").build(CPU)


def test_clips_are_read_from_gifs_and_folders_alike(tmp_path):
    from PIL import Image

    frames = [Image.new("RGB", (8, 8), (40 * nth, 0, 255)) for nth in range(3)]
    frames[0].save(tmp_path / "clip.gif", save_all=True, append_images=frames[1:])
    (tmp_path / "frames").mkdir()
    for nth, frame in enumerate(frames):
        frame.save(tmp_path / "frames" / f"{nth}.png")
    pictures, movie = read_clip(tmp_path / "frames"), read_clip(tmp_path / "clip.gif", size=(4, 4))
    assert pictures.shape == (3, 3, 8, 8)
    assert pictures[0, :, 0, 0].tolist() == pytest.approx([-1, 40 / 127.5 - 1, 80 / 127.5 - 1])
    assert movie.shape == (3, 3, 4, 4)
    assert movie[2].min() > 0.98
