"""Settings that make no sense are refused."""

import pytest

from groupwise.core.errors import UserError
from groupwise.workloads.chat.config import PolicyConfig, SamplingParams


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"temperature": -1.0}, "temperature is -1"), ({"top_k": 0}, "top_k is 0"), ({"top_p": 1.5}, "top_p is 1.5")],
)
def test_settings_without_sense_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        SamplingParams(**settings)


def test_an_adapter_reference_needs_an_adapter():
    with pytest.raises(UserError, match="reference is adapter"):
        PolicyConfig(reference="adapter")
