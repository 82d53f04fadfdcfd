"""Camera layers on diffusers' Wan transformer."""

import torch
from diffusers import WanTransformer3DModel
from torch.testing import assert_close

from groupwise.workloads.flow.models.camera_layers import add_camera_layers, camera_velocity, camera_weights


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
