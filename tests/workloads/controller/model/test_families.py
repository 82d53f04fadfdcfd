"""The sweep of families: each is equal to transformers or refused with a reason, and the docs say which."""

from functools import partial

import pytest
from markdown_blocks import ROOT
from tiny.families import FAMILIES, SLIDING, classes_without_adapter, llava, outcome, table

from groupwise.core.errors import UserError
from groupwise.workloads.controller.model.adapters import check_family

PAGE = (ROOT / "docs" / "model-families.md").read_text()
ROWS = dict(line.strip("| ").split(" | ", 1) for line in PAGE.splitlines() if line.startswith("| ") and " | " in line)


def test_the_page_lists_the_families_of_the_sweep():
    shown = {name: result for name, result in ROWS.items() if name in FAMILIES}
    assert list(shown) == list(FAMILIES)
    assert len(shown) >= 25
    assert table(shown) in PAGE


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_equal_or_refused_as_the_page_says(family):
    assert outcome(FAMILIES[family]) == ROWS[family]


def test_what_has_no_adapter_is_refused_by_name_and_listed():
    for name in classes_without_adapter():
        assert f"`{name}`" in PAGE
        with pytest.raises(UserError, match=f"{name} has no adapter"):
            check_family(name, None)


@pytest.mark.parametrize("text", SLIDING)
def test_prompts_beyond_a_sliding_window_are_refused(text):
    """Attention of all families tells the window to the executor: short prompts alone would not show it."""
    settings = {"sliding_window": 4, "layer_types": ["sliding_attention"] * 4, **SLIDING[text]}
    result = outcome(partial(llava, text, **settings))
    assert "longer than this model's sliding window of 4" in result
