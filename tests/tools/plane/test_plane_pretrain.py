"""How the embedded model is made: the same steps whether or not it was stopped, and clips that are what they say."""

from dataclasses import replace

import pytest
import torch
from tools.plane.pretrain import PretrainConfig, build, draw_batch, loss_of, pretrain
from torch.testing import assert_close

import groupwise as gw
from groupwise.workloads.flow.tasks.plane.model import ASSET, PlaneModel, load_plane, save_plane
from groupwise.workloads.flow.tasks.plane.scene import LARGEST, draw_motions, draw_scenes, path_of, render_clip

TINY = PretrainConfig(steps=6, rows=2, width=24, heads=2, blocks=1, hidden=24, warmup=2, decay=2)


def test_stopped_and_resumed_it_ends_bit_by_bit_the_same(tmp_path):
    said = []
    straight = pretrain(TINY, tmp_path / "straight", say=said.append)
    pretrain(TINY, tmp_path / "stopped", say=said.append, stop_after=3)
    stopped = pretrain(TINY, tmp_path / "stopped", say=said.append)
    ours, theirs = straight.state_dict(), stopped.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(gw.UserError, match="another plan"):
        pretrain(replace(TINY, seed=1), tmp_path / "stopped", say=said.append)


def test_a_fresh_model_is_as_wrong_as_knowing_nothing_and_learns():
    plan = replace(TINY, steps=30, rows=8, warmup=5, decay=5)
    model = build(plan)
    first = loss_of(model, plan, 0).item()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(30):
        optimizer.zero_grad()
        loss_of(model, plan, step).backward()
        optimizer.step()
    assert loss_of(model, plan, 31).item() < 0.9 * first


def test_batches_hold_true_clips_with_wrong_poses():
    plan = replace(TINY, rows=64, prompt_dropped=0.5)
    batch = draw_batch(plan, 1)
    numbers = 64 + torch.arange(64)
    motions = draw_motions(plan.seed, numbers)
    clips = render_clip(draw_scenes(plan.seed, numbers), path_of(motions))
    gains = (batch.clip * clips).flatten(1).sum(1) / clips.square().flatten(1).sum(1)
    assert_close(batch.clip, gains.view(-1, 1, 1, 1, 1) * clips)
    assert set((100 * gains).round().int().tolist()) == {100, 70, 45}
    wrong = (batch.camera - path_of(motions))[:, -1, 3::4].std(0)
    assert_close(wrong, plan.drift * torch.tensor(LARGEST[3:]), rtol=0.3, atol=0)
    assert_close(batch.camera[:, 0], path_of(motions)[:, 0])
    silent = batch.text[:, :, 0].all(1).float().mean()
    assert 0.3 < silent < 0.7


def test_saved_and_loaded_it_is_the_same(tmp_path):
    model = build(TINY).eval()
    save_plane(model, tmp_path)
    loaded = load_plane(tmp_path)
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in model.state_dict().items())


def test_the_shipped_model_is_small_and_follows_the_camera():
    assert sum(path.stat().st_size for path in ASSET.iterdir()) < 6 * 2**20
    model = PlaneModel(load_plane())
    plan = PretrainConfig()
    losses = {}
    with torch.no_grad():
        for name, camera in (("right", None), ("none", path_of(torch.zeros(32, 5, 6)))):
            batch = draw_batch(plan, 10_000_000)
            sigma = torch.full((32,), 0.8)
            noisy = 0.2 * batch.clip + 0.8 * batch.noise
            encoding = {
                "text": batch.text,
                "source": batch.source,
                "camera": batch.camera if camera is None else camera,
            }
            clean = noisy - 0.8 * model.velocity(noisy, sigma, encoding)
            losses[name] = ((clean - batch.clip).square().mean() / batch.clip.square().mean()).item()
    assert losses["right"] < 0.35
    assert losses["none"] > 1.5 * losses["right"]
