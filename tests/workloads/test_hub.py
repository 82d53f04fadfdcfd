"""A hub that cannot be reached is noticed within seconds, and what is in the cache is still used."""

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
