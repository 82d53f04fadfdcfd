"""A hub that cannot be reached is noticed within seconds, and what is in the cache is still used."""

import json
import os
import time

import pytest
from huggingface_hub import constants
from processes import free_port

from groupwise.core.errors import UserError
from groupwise.workloads.hub import load_from_hub


@pytest.fixture
def unreachable(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_an_unreachable_hub_is_refused_without_retries(unreachable):
    from transformers import AutoConfig

    begun = time.monotonic()
    with pytest.raises(UserError, match="in the local cache, not on the hub, which cannot be reached") as raised:
        load_from_hub("nowhere", lambda: AutoConfig.from_pretrained("nowhere"), called="The model 'nowhere'")
    assert time.monotonic() - begun < 20
    assert "\n" not in str(raised.value)


def test_what_the_loader_has_is_returned_without_the_hub(unreachable):
    assert load_from_hub("cached", lambda: 5, called="The model") == 5
    assert constants.HF_HUB_OFFLINE  # so that the hub's library asks its cache alone


@pytest.mark.timeout(60)
def test_a_folder_is_looked_at_before_it_is_loaded(tmp_path):
    def load():
        raise AssertionError("loaded")

    def refuse(message):
        with pytest.raises(UserError, match=message):
            load_from_hub(str(tmp_path), load, called="The model")

    config = tmp_path / "config.json"
    for content in ({"num_hidden_layers": 10**9}, {"vision": {"depth": 10**400}}):
        config.write_text(json.dumps(content))
        refuse("a model has at most 10,000")
    config.write_text("[" * 100_000)
    refuse("nested too deeply")
    config.unlink()
    os.mkfifo(config)
    refuse("not a regular file")


def test_whatever_a_loader_raises_is_a_sentence(tmp_path):
    def load():
        raise AttributeError("a list has no attribute 'get'")

    with pytest.raises(UserError, match="The model cannot be loaded"):
        load_from_hub(str(tmp_path), load, called="The model")
