"""Pretraining of the embedded flow model: resumable, on clips that go the way that they claim, or not."""

from dataclasses import replace

import pytest
import torch
from tools.sprites.__main__ import main
from tools.sprites.pretrain import PretrainConfig, build, denoising_loss, draw_batch, pretrain
from torch.testing import assert_close

import groupwise as gw
from groupwise.workloads.flow.data.cameras import motion_to_pose
from groupwise.workloads.flow.tasks.sprites.config import ASSET
from groupwise.workloads.flow.tasks.sprites.latents import latents_of
from groupwise.workloads.flow.tasks.sprites.model import SpritesModel, load_sprites
from groupwise.workloads.flow.tasks.sprites.scene import draw_motions, draw_scenes

TINY = PretrainConfig(shared_steps=3, own_steps=3, rows=2, width=24, heads=2, blocks=1, hidden=24, warmup=2)


def equal(first, second):
    return all(torch.equal(weight, second.state_dict()[name]) for name, weight in first.state_dict().items())


def test_a_resumed_run_is_bit_identical(tmp_path):
    log = [].append
    for folder, stops in (("straight", (None,)), ("stopped", (1, 2, None))):
        for stop in stops:
            pretrain(TINY, tmp_path / folder, "shared", log=log, stop_after=stop)
    straight = pretrain(TINY, tmp_path / "straight", "base", log=log)
    pretrain(TINY, tmp_path / "stopped", "base", log=log, stop_after=4)
    assert equal(straight, pretrain(TINY, tmp_path / "stopped", "base", log=log))
    assert not equal(straight, pretrain(TINY, tmp_path / "stopped", "upper", log=log))
    with pytest.raises(gw.UserError, match="another plan"):
        pretrain(replace(TINY, seed=1), tmp_path / "stopped", "base", log=log)


def test_the_learning_rate_by_hand():
    config = PretrainConfig(shared_steps=100, own_steps=50, warmup=10, learning_rate=1.0)
    rates = [config.learning_rate_at(step) for step in (0, 4, 9, 50, 99, 100, 125, 149)]
    assert rates == pytest.approx([0.1, 0.5, 1, 1, 1, 1, 0.5, 0.02])


def test_a_fresh_model_learns():
    config = replace(TINY, rows=8)
    model = build(config)
    first = denoising_loss(model, draw_batch(config, 0, exact=True)).item()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(30):
        optimizer.zero_grad()
        denoising_loss(model, draw_batch(config, step, exact=True)).backward()
        optimizer.step()
    assert denoising_loss(model, draw_batch(config, 31, exact=True)).item() < 0.9 * first


def test_badly_labeled_clips_go_further_than_their_labels_say_along_the_same_path():
    config = replace(TINY, rows=256, prompt_dropped=0.5)
    numbers = 256 + torch.arange(256)
    scenes, motions = draw_scenes(config.seed, numbers), draw_motions(config.seed, numbers)
    exact, bad = (draw_batch(config, 1, exact=exact) for exact in (True, False))
    assert torch.equal(exact.noise, bad.noise)
    assert_close(exact.conditioning["camera"], motion_to_pose(motions))
    end, labels = motions[:, -1, 3:5], bad.conditioning["camera"][:, -1, 3:8:4]  # across, at the end of the path
    scale = _share_along(labels, end)
    assert_close(labels, scale[:, None] * end)
    assert 0.45 <= scale.min() < 0.5
    assert 1.05 < scale.max() <= 1.1 + 1e-4
    # the last two channels say how far the clip really went, in units of 0.25: at the middle, as far as the camera
    went = bad.clean[:, 5:, -1, 5:7, 5:7].mean((-1, -2)) / 4
    gain = _share_along(went, labels)
    assert gain.min() > 0.85
    assert gain.max() < 2.15
    assert gain.mean().item() == pytest.approx(1.5, abs=0.06)
    assert gain.std().item() == pytest.approx(1.2 / 12**0.5, abs=0.04)
    light = 0.7 + 0.3 * 0.8 * exact.clean[:, 4, 0, 0, 0]
    assert_close(exact.clean, latents_of(scenes, motion_to_pose(motions), light))
    assert set((100 * light).round().int().tolist()) == {100, 70, 45}
    assert 0.35 < exact.conditioning["text"][:, :, 0].all(1).float().mean() < 0.65


def _share_along(vectors, directions):
    return (vectors * directions).sum(1) / directions.square().sum(1)


def test_the_command_writes_models_that_can_be_loaded(tmp_path):
    main(tmp_path, TINY)
    for name in ("base", "upper"):
        written, trained = load_sprites(tmp_path / "asset" / name), pretrain(TINY, tmp_path, name, log=print)
        for key, weight in trained.state_dict().items():
            assert torch.equal(written.state_dict()[key], weight.bfloat16().float())


def test_the_embedded_models_are_small_and_differ_in_whom_they_believe():
    """The upper bound expects a camera that goes where the label says; the base model, one that goes further."""
    assert sum(path.stat().st_size for path in ASSET.rglob("*") if path.is_file()) < 8 * 10**6
    config = PretrainConfig(rows=64)
    batch = draw_batch(config, 10_000_000, exact=True)
    sigma = torch.ones(64)
    for name, low, high in (("base", 1.25, 1.75), ("upper", 0.9, 1.1)):
        model = SpritesModel(load_sprites(ASSET / name))
        with torch.no_grad():
            clean = batch.noise - model.velocity(batch.noise, sigma, batch.conditioning)
        gain = (clean[:, 5:, -1] * batch.clean[:, 5:, -1]).sum() / batch.clean[:, 5:, -1].square().sum()
        assert low < gain < high, name
