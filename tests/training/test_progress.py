"""The progress bar where stderr is no terminal: plain lines, not too many."""

import pytest

from groupwise.training.progress import progress_bar


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
