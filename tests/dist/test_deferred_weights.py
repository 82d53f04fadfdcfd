"""Weights that each rank reads from files for its part alone equal those that are loaded whole and sharded after."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from processes import ENVIRONMENT
from tiny.llama import save_model
from torch import nn

from groupwise.dist.deferred_weights import defer_weights, deferring_weights, files_in, is_deferred, without_weights
from groupwise.recipes import load_recipe
from groupwise.workloads.chat.config import PolicyConfig
from groupwise.workloads.chat.engine.policy import load_policy

WORKER = Path(__file__).parent / "deferred_worker.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_two_and_three_ranks_all_weights_buffers_and_copies_are_bit_equal(tmp_path):
    program = [sys.executable, WORKER, tmp_path, "2", "3"]
    ended = subprocess.run(program, env=ENVIRONMENT, capture_output=True, text=True, timeout=800, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    for ranks in (2, 3):
        for case, (compared, *differing) in json.loads((tmp_path / f"{ranks}.json").read_text()).items():
            assert compared > 30, case
            assert differing == [], case


@pytest.fixture
def model(tmp_path):
    return save_model(tmp_path / "model")


def test_a_deferred_policy_holds_no_weight_and_its_adapter_is_the_one_that_is_added_to_loaded_weights(model):
    config = PolicyConfig(model=str(model), lora_rank=2)
    with deferring_weights(True):
        deferred = load_policy(config)
    loaded = load_policy(config)
    weights = dict(loaded.named_parameters())
    assert {name for name, _ in deferred.named_parameters()} == weights.keys()
    for name, weight in deferred.named_parameters():
        assert weight.is_meta == (not weight.requires_grad)
        assert (weight.shape, weight.dtype) == (weights[name].shape, weights[name].dtype)
        assert weight.is_meta or torch.equal(weight, weights[name])
    for (_, buffer), (_, expected) in zip(deferred.named_buffers(), loaded.named_buffers(), strict=True):
        assert torch.equal(buffer, expected)


def test_a_tied_head_stays_tied():
    with deferring_weights(True):
        policy = load_policy(load_recipe("chat").workload.policy)
    assert is_deferred(policy)
    assert policy.model.lm_head.weight is policy.model.model.embed_tokens.weight


def test_what_a_folder_lacks_is_left_to_transformers_which_refuses_it(model):
    settings = transformers.AutoConfig.from_pretrained(model)
    with without_weights():
        larger = transformers.AutoModelForCausalLM.from_config(settings)
        larger.model.layers[0].mlp.up_proj = nn.Linear(3, 3)
    files = files_in(model, "model")
    assert not defer_weights(larger, files)
    assert files_in(model.parent, "model") is None
    settings.num_hidden_layers += 1
    settings.save_pretrained(model)
    with deferring_weights(True), pytest.raises(ValueError, match="lacks 9 of its weights"):
        load_policy(PolicyConfig(model=str(model)))


def test_weights_are_deferred_for_sharding_alone(model):
    assert not is_deferred(load_policy(PolicyConfig(model=str(model))))
