"""LLaVA-NeXT: its own grids, and prompts whose length depends on the image's shape."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny.families import llava_next
from torch.testing import assert_close

from groupwise.core.errors import UserError
from groupwise.workloads.controller.model.adapters import Sample, adapter_for, default_options
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor
from groupwise.workloads.controller.model.images import ImageNormalization, open_image

ADAPTER = adapter_for(llava_next())
OPTIONS = default_options(ADAPTER)
NEUTRAL = ImageNormalization((0.5,) * 3, (0.5,) * 3)


def sample(width, height):
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    crops = ADAPTER.crop(open_image(pixels), OPTIONS, NEUTRAL)
    return Sample(f"{width} x {height}", crops, (3, 4, 5), (1,))


def test_tiers_are_the_models_own_grids():
    assert OPTIONS.crops_by_tier == {"low": 2, "medium": 3, "high": 4}
    wide, tall = (ADAPTER.crop_shapes(sides, OPTIONS) for sides in ((30, 60), (60, 30)))
    assert [shape[4:] for shape in wide.values()] == [(1, 2), (1, 3), (2, 2)]  # never 1 x 4: it is none of them
    assert [shape[4:] for shape in tall.values()] == [(2, 1), (3, 1), (2, 2)]
    # 2 x 2 patches a crop. Overview 4; 1 x 2 crops: 2 rows of 4 patches and a token; 2 x 1: 4 rows of 2 and a token.
    assert ADAPTER.image_tokens(wide["low"]) == 4 + 2 * (4 + 1)
    assert ADAPTER.image_tokens(tall["low"]) == 4 + 4 * (2 + 1)
    with pytest.raises(UserError, match="no grid of 6 crops: it was trained with 2, 3, 4"):
        ADAPTER.crop_shapes((60, 60), replace(OPTIONS, crops_by_tier={"low": 2, "high": 6}))


@torch.inference_mode()
def test_images_of_all_shapes_are_answered_as_transformers_does():
    requests = [
        AnswerRequest(sample(*size), replace(OPTIONS.full, tier=tier))
        for size in ((60, 30), (30, 60), (40, 40))
        for tier in OPTIONS.crops_by_tier
    ]
    answers, _ = Executor(ADAPTER, OPTIONS).answer(requests, max_new_tokens=3)
    for request, answer in zip(requests, answers, strict=True):
        stock = ADAPTER.stock_logits(request.sample, request.knobs.tier, answer.tokens[:-1])
        assert_close(answer.first_logits, stock[0], rtol=0, atol=1e-4)
        assert tuple(stock.argmax(-1).tolist()) == answer.tokens
