"""What identifies a model's configuration: everything but where and how it was loaded."""

from types import SimpleNamespace

from groupwise.workloads.hub import stable_config


def model_with(**settings):
    return SimpleNamespace(config=SimpleNamespace(to_dict=lambda: settings))


def test_where_a_model_was_loaded_does_not_change_its_configuration():
    inner = {"width": 8, "_attn_implementation": "sdpa", "dtype": "bfloat16"}
    here = model_with(layers=2, text=inner, parts=[inner], _name_or_path="/here", transformers_version="5.1")
    there = model_with(parts=[{"width": 8}], text={"width": 8, "dtype": "float32"}, layers=2, _name_or_path="/there")
    assert stable_config(here) == stable_config(there) == '{"layers": 2, "parts": [{"width": 8}], "text": {"width": 8}}'
    assert stable_config(model_with(layers=3)) != stable_config(model_with(layers=2))
    named = model_with(layers=2, architectures=["A"])
    assert stable_config(named) != stable_config(model_with(layers=2))
    assert stable_config(named, ignore=("architectures",)) == stable_config(model_with(layers=2))
