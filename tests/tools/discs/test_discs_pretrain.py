"""Pretraining of the embedded image model: resumable, on images whose captions are often wrong."""

from dataclasses import replace

import pytest
import torch
from tools.discs.__main__ import main
from tools.discs.pretrain import PretrainConfig, draw_batch, pretrain

import groupwise as gw
from groupwise.workloads.flow.tasks.discs.config import ASSET
from groupwise.workloads.flow.tasks.discs.judge import obeys
from groupwise.workloads.flow.tasks.discs.model import load_discs
from groupwise.workloads.flow.tasks.discs.scene import decode

TINY = PretrainConfig(steps=6, rows=2, width=24, heads=2, blocks=1, warmup=2)


def test_a_resumed_run_is_bit_identical_and_the_command_writes_it(tmp_path):
    log = [].append
    main(tmp_path / "straight", TINY)
    pretrain(TINY, tmp_path / "stopped", log=log, stop_after=3)
    stopped = pretrain(TINY, tmp_path / "stopped", log=log).state_dict()
    straight = load_discs(tmp_path / "straight" / "asset").state_dict()
    assert all(torch.equal(straight[name], weight.bfloat16().float()) for name, weight in stopped.items())
    with pytest.raises(gw.UserError, match="another plan"):
        pretrain(replace(TINY, seed=1), tmp_path / "stopped", log=log)


def test_captions_are_wrong_as_often_as_the_config_says():
    config = replace(TINY, rows=512)
    obeyed = _obeyed(draw_batch(config, 1))
    # a disc in a corner of the asked half counts for both places, which is rare
    assert obeyed == pytest.approx((1 - 0.45) * (1 - 0.05) * (1 - 0.3), abs=0.06)
    assert _obeyed(draw_batch(replace(config, miscounted=0.0, wrong_colors=0.0, mirrored=0.0), 1)) == 1


def _obeyed(batch):
    """Share of the images that obey their captions."""
    said = batch.conditioning["text"].argmax(-1)
    meanings = torch.stack([said[:, 0], said[:, 1] - 3, said[:, 3] - 6], dim=1)
    return obeys(decode(batch.clean), meanings).float().mean().item()


def test_the_embedded_model_is_small():
    assert sum(path.stat().st_size for path in ASSET.iterdir()) < 4 * 2**20
