"""Pretraining of the embedded flow model: resumable, on clips with the camera paths that they claim."""

from dataclasses import replace

import pytest
import torch
from tools.plane.__main__ import main
from tools.plane.pretrain import PretrainConfig, build, draw_batch, flow_matching_loss, pretrain
from torch.testing import assert_close

import groupwise as gw
from groupwise.workloads.flow.cameras import motion_to_pose
from groupwise.workloads.flow.tasks.plane.config import ASSET
from groupwise.workloads.flow.tasks.plane.model import PlaneModel, load_plane, save_plane
from groupwise.workloads.flow.tasks.plane.scene import MAX_MOTION, draw_motions, draw_scenes, render_clip

TINY = PretrainConfig(steps=6, rows=2, width=24, heads=2, blocks=1, hidden=24, warmup=2, decay=2)


def test_a_resumed_run_is_bit_identical(tmp_path):
    log = [].append
    straight = pretrain(TINY, tmp_path / "straight", log=log)
    pretrain(TINY, tmp_path / "stopped", log=log, stop_after=3)
    stopped = pretrain(TINY, tmp_path / "stopped", log=log)
    ours, theirs = straight.state_dict(), stopped.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(gw.UserError, match="another plan"):
        pretrain(replace(TINY, seed=1), tmp_path / "stopped", log=log)


def test_a_fresh_model_learns():
    config = replace(TINY, steps=30, rows=8, warmup=5, decay=5)
    model = build(config)
    first = flow_matching_loss(model, config, 0).item()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(30):
        optimizer.zero_grad()
        flow_matching_loss(model, config, step).backward()
        optimizer.step()
    assert flow_matching_loss(model, config, 31).item() < 0.9 * first


def test_batches_hold_rendered_clips_with_drifted_poses():
    config = replace(TINY, rows=64, prompt_dropped=0.5)
    batch = draw_batch(config, 1)
    numbers = 64 + torch.arange(64)
    motions = draw_motions(config.seed, numbers)
    clips = render_clip(draw_scenes(config.seed, numbers), motion_to_pose(motions))
    gains = (batch.clip * clips).flatten(1).sum(1) / clips.square().flatten(1).sum(1)
    assert_close(batch.clip, gains.view(-1, 1, 1, 1, 1) * clips)
    assert set((100 * gains).round().int().tolist()) == {100, 70, 45}
    drift = (batch.camera - motion_to_pose(motions))[:, -1, 3::4].std(0)
    assert_close(drift, config.drift * torch.tensor(MAX_MOTION[3:]), rtol=0.3, atol=0)
    assert_close(batch.camera[:, 0], motion_to_pose(motions)[:, 0])
    dropped = batch.text[:, :, 0].all(1).float().mean()
    assert 0.3 < dropped < 0.7


def test_the_command_writes_a_model_that_can_be_loaded(tmp_path):
    main(tmp_path, TINY)
    written, trained = load_plane(tmp_path).state_dict(), pretrain(TINY, tmp_path / "same", log=print).state_dict()
    assert all(torch.equal(written[name], weight) for name, weight in trained.items())


def test_saved_and_loaded_it_is_the_same(tmp_path):
    model = build(TINY).eval()
    save_plane(model, tmp_path)
    loaded = load_plane(tmp_path)
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in model.state_dict().items())


def test_the_embedded_model_is_small_and_follows_the_camera():
    assert sum(path.stat().st_size for path in ASSET.iterdir()) < 6 * 2**20
    model = PlaneModel(load_plane())
    config = PretrainConfig()
    losses = {}
    with torch.no_grad():
        for name, camera in (("right", None), ("none", motion_to_pose(torch.zeros(32, 5, 6)))):
            batch = draw_batch(config, 10_000_000)
            sigma = torch.full((32,), 0.8)
            noisy = 0.2 * batch.clip + 0.8 * batch.noise
            conditioning = {
                "text": batch.text,
                "source": batch.source,
                "camera": batch.camera if camera is None else camera,
            }
            clean = noisy - 0.8 * model.velocity(noisy, sigma, conditioning)
            losses[name] = ((clean - batch.clip).square().mean() / batch.clip.square().mean()).item()
    assert losses["right"] < 0.35
    assert losses["none"] > 1.5 * losses["right"]
