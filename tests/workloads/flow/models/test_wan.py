"""Wan with camera layers, tiny and random, saved and loaded as a pipeline folder."""

import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import save_file
from tiny.wan import LORA
from torch.testing import assert_close

import groupwise as gw
from groupwise.workloads.flow.config import TrainedPartsConfig
from groupwise.workloads.flow.data.cameras import motion_to_pose
from groupwise.workloads.flow.models.camera_layers import camera_weights
from groupwise.workloads.flow.models.wan import ClipSize, WanCameraModel
from groupwise.workloads.flow.task import Condition
from workloads.flow.small import CPU

SIZE = ClipSize(frames=5, height=16, width=16)  # 2 latent frames of 2 x 2


def model(folder, **settings):
    return WanCameraModel(folder, SIZE, train=settings.pop("train", LORA), device=CPU, dtype="float32", **settings)


def condition(distance=0.0):
    source = torch.linspace(-1, 1, 3 * 5 * 16 * 16).view(3, 5, 16, 16)
    return Condition("a cat", source, motion_to_pose(torch.full((2, 6), distance) * torch.tensor([[0.0], [1.0]])))


def test_encodings_are_those_of_the_pipeline_and_its_parts_stay_off_the_device(wan):
    ours = model(wan, negative_prompt="blurry")
    (encoding,) = ours.encode([condition()])
    pipeline = WanPipeline.from_pretrained(wan)
    with torch.no_grad():
        positive, negative = pipeline.encode_prompt(["a cat"], ["blurry"], device=CPU, max_sequence_length=512)
        latents = pipeline.vae.encode(condition().source_clip[None]).latent_dist.mode()
    assert_close(encoding["text"], positive[0])
    assert_close(encoding["negative_text"], negative[0])
    mean, std = (
        torch.tensor(getattr(pipeline.vae.config, name)).view(1, -1, 1, 1, 1)
        for name in ("latents_mean", "latents_std")
    )
    assert_close(encoding["source"], ((latents - mean) / std)[0])
    assert ours.pipeline.transformer is None
    assert ours.condition_spec.latent_shape == (16, 2, 2, 2)
    clip = ours.decode(encoding["source"][None])
    assert clip.shape == (1, 3, 5, 16, 16)
    with torch.no_grad():
        assert_close(clip, pipeline.vae.decode(latents).sample.clamp(-1, 1), rtol=0, atol=1e-4)


def test_lora_trains_alone_and_the_reference_is_the_adapter_switched_off(wan):
    ours = model(wan)
    names = [name for name, weight in ours.policy.named_parameters() if weight.requires_grad]
    assert names
    assert all("lora" in name for name in names)
    assert any("pose_encoder" in name for name in names)
    encoding = {
        name: column[None]
        for name, column in ours.encode([condition(0.1)])[0].items()
        if not name.startswith("negative_")
    }
    latents, sigma = torch.randn(1, 16, 2, 2, 2), torch.tensor([0.5])
    initial = ours.velocity(latents, sigma, encoding).detach()
    with torch.no_grad():
        for name, weight in ours.policy.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
    trained = ours.velocity(latents, sigma, encoding)
    assert not torch.allclose(trained, initial)
    with torch.no_grad(), ours.reference():
        assert_close(ours.velocity(latents, sigma, encoding), initial)
    trained.sum().backward()  # the graph outlives the switch
    assert all(weight.grad is not None for weight in ours.policy.parameters() if weight.requires_grad)
    same = model(wan)
    theirs = dict(same.policy.named_parameters())
    assert all(torch.equal(theirs[name], w) for name, w in ours.policy.named_parameters() if "lora_A" in name)


@pytest.mark.parametrize("part", ["camera", "all"])
def test_other_parts_have_the_initial_weights_as_their_reference(wan, part):
    ours = model(wan, train=TrainedPartsConfig(part))
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
        for name, weight in camera_weights(model(wan, train=TrainedPartsConfig("camera")).policy).items()
    }
    save_file(saved, tmp_path / "camera.safetensors")
    read = model(wan, train=TrainedPartsConfig("camera"), camera_layers=tmp_path / "camera.safetensors")
    assert all((weight == 0.25).all() for weight in camera_weights(read.policy).values())
    save_file({"other": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(gw.UserError, match="does not hold the camera layers"):
        model(wan, camera_layers=tmp_path / "other.safetensors")
