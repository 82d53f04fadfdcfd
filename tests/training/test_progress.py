"""The progress bar where stderr is no terminal: plain lines, not too many."""

import pytest

from groupwise.memory.measure import MemoryUsage
from groupwise.training.progress import describe_memory, progress_bar


@pytest.mark.parametrize(
    ("total", "shown"), [(3, [1, 2, 3]), (40, [1, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40]), (1, [1]), (0, [])]
)
def test_plain_lines_for_the_first_the_last_and_every_tenth(capsys, total, shown):
    with progress_bar(total, "answer") as bar:
        for number in range(total):
            bar.advance(f"[{number}]")
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [f"answer {number}/{total}  [{number - 1}]" for number in shown]
    assert not captured.out


def test_what_was_done_earlier_is_skipped(capsys):
    with progress_bar(10, "step") as bar:
        bar.start_at(8)
        bar.advance()
        bar.advance()
    assert capsys.readouterr().err.splitlines() == ["step 9/10", "step 10/10"]


@pytest.mark.parametrize(
    ("planned", "text"),
    [
        (None, "memory 300.0 MiB (30%)"),
        (400, "memory 300.0 MiB (30%), planned at most 400.0 MiB"),
        (299, "memory 300.0 MiB (30%), planned at most 299.0 MiB"),
        (200, "memory 300.0 MiB (30%), planned at most 200.0 MiB (exceeded by 50%)"),
    ],
)
def test_a_plan_is_an_upper_limit_and_what_exceeds_it_is_said(planned, text):
    usage = MemoryUsage(peak=300 << 20, current=0, device=1000 << 20, host=0, predicted=planned and planned << 20)
    assert describe_memory(usage) == text
