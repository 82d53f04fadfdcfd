"""The shipped model: loads as transformers loads, is right often enough, and its knobs act."""

from pathlib import Path

import pytest
import torch
from tiny.mosaic import answer_logits, configured, kept_blocks
from tools.mosaic.importance import answer_losses, features_of
from transformers import LlavaForConditionalGeneration

from groupwise.core.errors import UserError
from groupwise.workloads.controller.tasks.mosaic.model import (
    ASSET,
    FIRST_DROPPABLE_BLOCK,
    load_drop_order,
    load_mosaic,
)
from groupwise.workloads.controller.tasks.mosaic.questions import make_question_set
from groupwise.workloads.controller.tasks.mosaic.scene import HandwritingSplit, Tier, cut

QUESTIONS = make_question_set(HandwritingSplit.TEST, 40)


@pytest.fixture(scope="module")
def model() -> LlavaForConditionalGeneration:
    return load_mosaic()


def _right(model: LlavaForConditionalGeneration, tier: Tier, blocks: int, top_k: int) -> float:
    kept = kept_blocks(load_drop_order(ASSET), blocks)
    right, _ = answer_losses(model, QUESTIONS, features_of(model, QUESTIONS, tier), blocks=kept, top_k=top_k)
    return float(right.mean())


def test_it_is_small():
    assert sum(file.stat().st_size for file in ASSET.iterdir()) <= 12e6


def test_transformers_loads_it_by_its_own_path_and_it_saves_and_loads_again(tmp_path: Path):
    model = LlavaForConditionalGeneration.from_pretrained(ASSET, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    again = LlavaForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in model.state_dict().items())
    text = model.config.text_config
    assert (text.model_type, model.config.vision_config.model_type) == ("olmoe", "siglip_vision_model")
    assert (text.num_hidden_layers, text.num_experts_per_tok, text.norm_topk_prob) == (12, 8, False)
    assert text.num_experts >= 16


def test_the_full_setting_is_right(model: LlavaForConditionalGeneration):
    assert _right(model, Tier.HIGH, 12, 8) >= 0.75


def test_the_cheapest_setting_is_right_less_often(model: LlavaForConditionalGeneration):
    assert _right(model, Tier.LOW, 8, 4) <= _right(model, Tier.HIGH, 12, 8) - 0.15


def test_alone_through_transformers_it_answers_as_in_the_dense_pass(model: LlavaForConditionalGeneration):
    right, _ = answer_losses(model, QUESTIONS, features_of(model, QUESTIONS, Tier.HIGH), blocks=range(12), top_k=8)
    with torch.inference_mode(), configured(model, range(12), 8):
        for row in range(0, 10 * QUESTIONS.questions_per_mosaic, 5):
            mosaic = row // QUESTIONS.questions_per_mosaic
            crops = cut(QUESTIONS.mosaics.pixels[mosaic : mosaic + 1], Tier.HIGH)[0]
            question = QUESTIONS.questions.tokens[row, : QUESTIONS.questions.lengths[row]].tolist()
            answer = answer_logits(model, crops, question, Tier.HIGH).argmax()
            assert (answer == QUESTIONS.questions.answers[row]) == right[row]


def test_the_drop_order_spares_the_blocks_before_an_insertion_position():
    order = load_drop_order(ASSET)
    assert len(set(order)) == 4
    assert min(order) >= FIRST_DROPPABLE_BLOCK


def test_a_folder_without_the_model_says_what_to_do(tmp_path: Path):
    with pytest.raises(UserError, match=r"python -m tools.mosaic pretrain"):
        load_mosaic(tmp_path)
