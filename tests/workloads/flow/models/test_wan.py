"""Adapters over diffusers' real classes, tiny and random, saved and loaded as pipeline folders."""

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from safetensors.torch import save_file
from torch.testing import assert_close

import groupwise as gw
from groupwise.workloads.flow.cameras import motion_to_pose
from groupwise.workloads.flow.config import TrainConfig
from groupwise.workloads.flow.models.camera_layers import add_camera_layers, camera_velocity, camera_weights
from groupwise.workloads.flow.models.pipeline_folder import on_device
from groupwise.workloads.flow.models.wan import ClipSize, WanCameraModel
from groupwise.workloads.flow.task import Condition
from workloads.flow.small import CPU
from workloads.flow.tiny_pipelines import LORA

SIZE = ClipSize(frames=5, height=16, width=16)  # 2 latent frames of 2 x 2


def model(folder, **settings):
    return WanCameraModel(folder, SIZE, train=settings.pop("train", LORA), device=CPU, dtype="float32", **settings)


def condition(nth=0):
    source = torch.linspace(-1, 1, 3 * 5 * 16 * 16).view(3, 5, 16, 16)
    return Condition("a cat", source, motion_to_pose(torch.full((2, 6), 0.1 * nth) * torch.tensor([[0.0], [1.0]])))


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
        with on_device(torch.device("meta"), part, None):
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
