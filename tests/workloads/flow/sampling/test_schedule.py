"""Which steps are sampled and trained."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import groupwise as gw
from groupwise.workloads.flow.sampling.schedule import SamplingConfig, WindowConfig, noise_levels, window_at

REFERENCE = json.loads((Path(__file__).parent.parent / "reference" / "dance_mix_kl.json").read_text())


def windows(steps, count, **window):
    config = SamplingConfig(num_inference_steps=steps, window=WindowConfig(**window))
    return [list(window_at(config, step)) for step in range(count)]


def test_windows_by_hand():
    assert windows(5, 2, kind="all") == [[0, 1, 2, 3]] * 2
    assert windows(10, 1, kind="first", share=0.3) == [[0, 1, 2]]
    assert windows(8, 5, kind="sliding", share=0.5, size=2) == [[0, 1], [1, 2], [2, 3], [0, 1], [1, 2]]
    assert windows(8, 4, kind="sliding", share=0.5, size=1, every=2) == [[0], [0], [1], [1]]


def test_levels_by_hand():
    assert noise_levels(SamplingConfig(num_inference_steps=4)) == [1.0, 0.75, 0.5, 0.25, 0.0]
    # 3 x .5 / (1 + 2 x .5) = .75
    assert noise_levels(SamplingConfig(num_inference_steps=2, shift=3.0, window=WindowConfig("all"))) == [
        1.0,
        0.75,
        0.0,
    ]


def test_levels_are_those_of_dancegrpo():
    levels = noise_levels(SamplingConfig(num_inference_steps=20, shift=3.0))
    assert levels == pytest.approx(REFERENCE["dancegrpo"]["sigmas"], abs=2e-7)  # float32


def test_windows_are_those_of_mixgrpo():
    """Its published script over the 23 of 25 steps that it trains: windows of 4 that move on by one."""
    published = REFERENCE["mixgrpo"]["windows"]
    steps, size, starts = (published[name] for name in ("sampling_steps", "size", "starts"))
    window = {"kind": "sliding", "share": 23 / 25, "size": size, "every": published["iters_per_group"]}
    assert windows(steps, len(starts), **window) == [list(range(start, start + size)) for start in starts]


@given(
    st.integers(2, 40),
    st.sampled_from(["all", "first", "sliding"]),
    st.floats(0.1, 1.0),
    st.integers(1, 2),
    st.integers(0, 99),
)
def test_a_window_is_within_the_steps_and_never_holds_the_last(steps, kind, share, size, step):
    try:
        config = SamplingConfig(num_inference_steps=steps, window=WindowConfig(kind, share=share, size=size))
    except gw.UserError:
        return
    window = window_at(config, step)
    assert len(window) >= 1
    assert window.start >= 0
    assert window.stop <= steps - 1
    assert kind != "sliding" or len(window) <= size


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_inference_steps": 1}, "the last step is never trained"),
        ({"eta": 0.0}, "nothing to compare"),
        ({"stepper": "cps", "eta": 1.0}, "below 1 for cps"),
        ({"num_inference_steps": 3, "window": WindowConfig("sliding", size=3)}, "window.size is 3"),
        ({"num_inference_steps": 4, "window": WindowConfig("first", share=0.05)}, "large enough for one step"),
    ],
)
def test_what_cannot_be_sampled_is_refused(settings, message):
    with pytest.raises(gw.UserError, match=message):
        SamplingConfig(**settings)
