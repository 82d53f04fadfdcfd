"""What a run has trained can be used without Groupwise."""

from dataclasses import replace

import pytest
import torch
from tiny.chat import chat_config, recipe
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

import groupwise as gw
from groupwise.core.errors import UserError
from groupwise.training.run import set_up
from groupwise.training.run_folder.checkpoint import restore
from groupwise.workloads.chat.build import export
from groupwise.workloads.chat.config import PolicyConfig
from groupwise.workloads.checkpoint_files import newest_valid_checkpoint


@pytest.mark.parametrize(("lora_rank", "ema_decay"), [(None, None), (2, None), (None, 0.5)])
def test_the_exported_model_computes_what_the_trained_policy_does(tmp_path, lora_rank, ema_decay):
    model = chat_config(tmp_path).policy.model
    config = recipe(tmp_path, policy=PolicyConfig(model=model, lora_rank=lora_rank), data=without_held_out(tmp_path))
    config = replace(
        config,
        steps=2,
        optimizer=replace(config.optimizer, ema_decay=ema_decay),
        run=gw.RunConfig(run_dir=tmp_path / "run", preflight=False),
    )
    gw.train(config)
    export(tmp_path / "run", tmp_path / "out")
    setup = set_up(config)
    restore(newest_valid_checkpoint(tmp_path / "run" / "checkpoints", print), setup.state)
    setup.workload.policy.causal_lm.set_attn_implementation("sdpa")  # to be called by itself
    ids = torch.arange(9)[None]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    untrained = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        if ema_decay:
            with setup.state.ema.swapped_in(setup.workload.policy):
                trained = setup.workload.policy.causal_lm(ids).logits
        else:
            trained = setup.workload.policy.causal_lm(ids).logits
        assert_close(exported(ids).logits, trained, rtol=0, atol=1e-4)
        assert (untrained(ids).logits - trained).abs().max() > 1e-2
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def without_held_out(folder):
    return replace(chat_config(folder).data, held_out="")


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no checkpoint of a run"):
        export(tmp_path, tmp_path / "out")
