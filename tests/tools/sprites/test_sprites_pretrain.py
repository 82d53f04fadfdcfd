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


def test_mislabeled_clips_show_a_path_that_has_nothing_to_do_with_the_label():
    config = replace(TINY, rows=256, prompt_dropped=0.5)
    numbers = 256 + torch.arange(256)
    scenes, motions = draw_scenes(config.seed, numbers), draw_motions(config.seed, numbers)
    exact, bad = (draw_batch(config, 1, exact=exact) for exact in (True, False))
    assert torch.equal(exact.noise, bad.noise)
    for batch in (exact, bad):
        assert_close(batch.conditioning["camera"], motion_to_pose(motions))
    mislabeled = (bad.clean != exact.clean).flatten(1).any(1)
    assert mislabeled.float().mean().item() == pytest.approx(config.mislabeled, abs=0.1)
    # the last two channels say how far the clip really went, in units of 0.25: at the middle, as far as the camera
    went, asked = (batch.clean[mislabeled, 5:, -1, 5:7, 5:7].mean((-1, -2)) / 4 for batch in (bad, exact))
    assert_close(asked, motions[mislabeled, -1, 3:5], atol=0.02, rtol=0)
    assert went.norm(dim=1).mean().item() == pytest.approx(asked.norm(dim=1).mean().item(), abs=0.03)
    cosine = torch.cosine_similarity(went, asked, dim=1)
    assert abs(cosine.mean()) < 0.15
    light = 0.7 + 0.3 * 0.8 * exact.clean[:, 4, 0, 0, 0]
    assert_close(exact.clean, latents_of(scenes, motion_to_pose(motions), light))
    assert set((100 * light).round().int().tolist()) == {100, 70, 45}
    assert 0.35 < exact.conditioning["text"][:, :, 0].all(1).float().mean() < 0.65


def test_the_command_writes_models_that_can_be_loaded(tmp_path):
    main(tmp_path, TINY)
    for name in ("base", "upper"):
        written, trained = load_sprites(tmp_path / "asset" / name), pretrain(TINY, tmp_path, name, log=print)
        for key, weight in trained.state_dict().items():
            assert torch.equal(written.state_dict()[key], weight.bfloat16().float())


def test_the_embedded_models_are_small_and_differ_in_how_far_they_believe_the_label():
    """From noise alone, the upper bound expects the whole labeled way; the base model, the share of right labels."""
    assert sum(path.stat().st_size for path in ASSET.rglob("*") if path.is_file()) < 8 * 10**6
    config = PretrainConfig(rows=64)
    batch = draw_batch(config, 10_000_000, exact=True)
    sigma = torch.ones(64)
    for name, low, high in (("base", 0.4, 0.6), ("upper", 0.9, 1.1)):
        model = SpritesModel(load_sprites(ASSET / name))
        with torch.no_grad():
            clean = batch.noise - model.velocity(batch.noise, sigma, batch.conditioning)
        share = (clean[:, 5:, -1] * batch.clean[:, 5:, -1]).sum() / batch.clean[:, 5:, -1].square().sum()
        assert low < share < high, name
