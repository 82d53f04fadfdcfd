"""ReCamMaster's own checkpoints: names map both ways, and the network computes what the original computes.

`recam_tiny.safetensors` has the published names; `recam_tiny_reference.npz` is what the original code made of it: A and
B forward passes, C losses and gradients of its training, D four steps with guidance.
"""

import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import groupwise as gw
from groupwise.workloads.flow.config import TrainedPartsConfig
from groupwise.workloads.flow.models.base import GuidedVelocity, guided
from groupwise.workloads.flow.models.camera_layers import add_camera_layers, camera_velocity
from groupwise.workloads.flow.models.checkpoints import (
    diffusers_name,
    load_camera_layers,
    original_name,
    original_state,
    read_weights,
)
from groupwise.workloads.flow.models.trained_parts import select_trained_parameters
from groupwise.workloads.flow.sampling.denoiser import Denoiser
from groupwise.workloads.flow.sampling.schedule import SamplingConfig, noise_levels

REFERENCE = Path(__file__).parent.parent / "reference"
WEIGHTS = REFERENCE / "recam_tiny.safetensors"
ORIGINAL = {name: torch.from_numpy(value) for name, value in np.load(REFERENCE / "recam_tiny_reference.npz").items()}
SIZES = {"num_attention_heads": 2, "attention_head_dim": 20, "in_channels": 4, "out_channels": 4, "text_dim": 24}
SIZES |= {"freq_dim": 32, "ffn_dim": 72, "num_layers": 2, "rope_max_seq_len": 128}


def fresh():
    transformer = WanTransformer3DModel(**SIZES).eval()
    add_camera_layers(transformer)
    return transformer


@pytest.fixture(scope="module")
def recam():
    transformer = fresh()
    load_camera_layers(transformer, WEIGHTS)
    return transformer


def velocity(transformer, joined, timestep, context, camera):
    """The target half, from a clip of target and source."""
    target, source = joined.float().chunk(2, dim=2)
    return camera_velocity(transformer, target, timestep, context, source, camera)


def test_all_names_map_both_ways():
    names = load_file(WEIGHTS).keys()
    transformer = fresh()
    assert {diffusers_name(name) for name in names} == {name for name, _ in transformer.named_parameters()}
    assert all(original_name(diffusers_name(name)) == name for name in names)
    assert diffusers_name("rope.freqs") is None


@torch.no_grad()
def test_forward_at_the_original_size(recam):
    out = velocity(recam, *(ORIGINAL[f"A_{name}"] for name in ("x", "timestep", "context", "camera")))
    assert_close(out, ORIGINAL["A_out"].chunk(2, dim=2)[0], rtol=0, atol=2e-5)


@torch.no_grad()
def test_forward_of_two_rows_with_their_own_timesteps(recam):
    inputs = [ORIGINAL[f"B_{name}"] for name in ("x", "timestep", "context", "camera")]
    assert_close(velocity(recam, *inputs), ORIGINAL["B_out"].chunk(2, dim=2)[0], rtol=0, atol=1e-5)
    still = velocity(recam, *inputs[:3], torch.zeros_like(inputs[3]))
    assert_close(still, ORIGINAL["B_out_zero_camera"].chunk(2, dim=2)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("index", [3, 500, 990])
def test_training_loss_and_gradients(index, precision):
    """bf16: the original rounds its timesteps; sigma and weight are looked up by the rounded one."""
    transformer = fresh()
    load_camera_layers(transformer, WEIGHTS)
    select_trained_parameters(transformer, TrainedPartsConfig("recam"))
    case = {name.removeprefix(f"C{index}_{precision}_"): value for name, value in ORIGINAL.items()}
    sigma, latents, noise = case["sigma_used"], ORIGINAL["C_latents"], ORIGINAL["C_noise"]
    target, source = latents.chunk(2, dim=2)
    noised = (1 - sigma) * target + sigma * noise.chunk(2, dim=2)[0]
    predicted = camera_velocity(
        transformer, noised, case["timestep"], ORIGINAL["B_context"][:1], source, ORIGINAL["B_camera"][:1]
    )
    if "pred_target_half" in case:
        assert_close(predicted, case["pred_target_half"], rtol=0, atol=1e-5)
    loss = ((predicted - (noise - latents).chunk(2, dim=2)[0]) ** 2).mean() * case["weight"]
    assert_close(loss, case["loss"], rtol=1e-5, atol=1e-7)
    loss.sum().backward()
    weights = dict(transformer.named_parameters())
    for name, gradient in case.items():
        if name.startswith("grad_"):
            ours = weights[diffusers_name(name.removeprefix("grad_"))].grad
            assert_close(ours, gradient, rtol=1e-3, atol=1e-7)
    trained = {original_name(name) for name, weight in weights.items() if weight.requires_grad}
    parts = ("cam_encoder", "projector", "self_attn")
    assert trained == {name for name in load_file(WEIGHTS) if any(part in name for part in parts)}


@torch.no_grad()
def test_four_steps_with_guidance(recam):
    config = SamplingConfig(num_inference_steps=4, shift=5.0, guidance_scale=5.0)
    model = SimpleNamespace(
        velocity=lambda x, sigma, inputs: camera_velocity(recam, x, 1000 * sigma, **inputs),
        guide=lambda positive, negative, sigma, scale: guided(positive, negative, scale),
        guides_in_one_pass=False,
    )
    conditioning = {"text": ORIGINAL["B_context"][:1], "negative_text": ORIGINAL["D_negative_context"]}
    conditioning |= {"source": ORIGINAL["D_source"], "camera": ORIGINAL["B_camera"][:1]}
    with_guidance = GuidedVelocity(model, conditioning, config.guidance_scale)
    for steps in range(1, 5):
        levels, window = noise_levels(config), range(steps, steps)
        denoiser = Denoiser(config, levels, (4, 3, 8, 12), torch.device("cpu"), window)
        latents = denoiser.denoise_to_window(ORIGINAL["D_noise"], with_guidance)
        assert_close(latents, ORIGINAL[f"D_latents_after_{steps - 1}"], rtol=0, atol=5e-5)


def test_a_ckpt_is_read_and_executes_nothing(tmp_path):
    torch.save(load_file(WEIGHTS), tmp_path / "step20000.ckpt")
    transformer = fresh()
    load_camera_layers(transformer, tmp_path / "step20000.ckpt")
    back = original_state(transformer)
    assert back.keys() == load_file(WEIGHTS).keys()
    assert all(torch.equal(back[name], weight) for name, weight in load_file(WEIGHTS).items())

    class Opens:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    (tmp_path / "evil.ckpt").write_bytes(pickle.dumps({"a": Opens()}))
    torch.save({"a": Opens()}, tmp_path / "worse.ckpt")
    for name in ("evil.ckpt", "worse.ckpt"):
        with pytest.raises(gw.UserError, match="code in a file is never executed"):
            read_weights(tmp_path / name)
    assert not (tmp_path / "executed").exists()
    torch.save({"step": 3}, tmp_path / "number.ckpt")
    with pytest.raises(gw.UserError, match="does not hold tensors by name"):
        read_weights(tmp_path / "number.ckpt")


def test_checkpoints_of_runs_are_read_with_or_without_buffers(tmp_path):
    transformer = fresh()
    weights = {name: torch.full_like(weight, 0.5) for name, weight in transformer.named_parameters()}
    (tmp_path / "step-000001").mkdir()
    save_file(weights, tmp_path / "step-000001" / "policy.safetensors")
    load_camera_layers(transformer, tmp_path / "step-000001")
    assert all((weight == 0.5).all() for weight in transformer.parameters())
    camera = {name: weight for name, weight in transformer.state_dict().items() if "processor" in name}
    for saved in (transformer.state_dict(), camera):
        save_file({name: weight.contiguous() for name, weight in saved.items()}, tmp_path / "whole.safetensors")
        load_camera_layers(fresh(), tmp_path / "whole.safetensors")


def test_other_files_are_refused(tmp_path):
    saved = load_file(WEIGHTS)
    cases = [
        ({"other": torch.zeros(1)}, "it lacks 'blocks.0.attn1.processor.pose_encoder.bias'"),
        ({**saved, "other": torch.zeros(1)}, "it holds 'other', which this transformer has not"),
        ({**saved, "blocks.0.projector.bias": torch.zeros(3)}, r"is \[3\], and the transformer's is \[40\]"),
        ({"blocks.0.attn1.to_q.lora_A.default.weight": torch.zeros(1)}, "holds a LoRA adapter"),
    ]
    for content, message in cases:
        save_file(content, tmp_path / "weights.safetensors")
        with pytest.raises(gw.UserError, match=message):
            load_camera_layers(fresh(), tmp_path / "weights.safetensors")
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(gw.UserError, match="cannot be read as weights"):
        load_camera_layers(fresh(), tmp_path / "text.safetensors")


def test_damaged_and_strange_checkpoints_are_refused(tmp_path):
    path = tmp_path / "weights.ckpt"
    torch.save({"a": torch.zeros(2)}, path)
    intact = path.read_bytes()
    for name in (b"_rebuild_tensor_v2", b"FloatStorage", b"OrderedDict"):
        path.write_bytes(intact.replace(name, b"\xff" * len(name)))
        with pytest.raises(gw.UserError, match="cannot be read as weights"):
            read_weights(path)
    for content in ({5: torch.zeros(2)}, {"a": torch.eye(2).to_sparse()}, {"a": torch.zeros(2, device="meta")}):
        torch.save(content, path)
        with pytest.raises(gw.UserError, match="does not hold tensors by name"):
            read_weights(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(gw.UserError, match="not a regular file"):
        read_weights(path)


@pytest.mark.parametrize("name", ["", "a\nb", "blocks.0.\n"])
def test_names_of_any_kind_have_a_translation_or_none(name):
    assert diffusers_name(name) is None
    assert original_name(name) is None
