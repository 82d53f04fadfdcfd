import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from processes import groupwise

from groupwise.cli.main import main
from groupwise.report.page import render
from groupwise.report.run_data import held_out_series, read_run


class Elements(HTMLParser):
    """What a browser would fetch or run, and the text it would show; every element must be closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text: list[str] = []
        self.kinds: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.kinds.add(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "srcset") and value]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(page: str) -> Elements:
    elements = Elements()
    elements.feed(page)
    assert not elements.open
    return elements


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "doors"
    ended = groupwise("train", "examples/doors.py", "--run-dir", str(folder), "--steps", "4")
    assert ended.returncode == 0, ended.stderr
    return folder


def test_the_page_is_self_contained_and_shows_every_metric(run_dir: Path):
    elements = read(render([read_run(run_dir)]))
    assert all(address.startswith("data:image/") for address in elements.fetched)
    assert "script" not in elements.kinds
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    shown = {text.strip() for text in elements.text}
    for name, value in last.items():
        if name not in ("step", "memory_bytes") and value is not None:
            assert name in shown, name


def test_memory_is_shown_as_measured(run_dir: Path):
    text = " ".join(read(render([read_run(run_dir)])).text)
    assert "peak, measured" in text


def test_a_judge_that_parts_from_the_reward_is_drawn_on_its_axes(run_dir: Path):
    run = read_run(run_dir)
    moments = {
        "before": {"held-out reward": 0.5, "judge": 0.2, "error (px)": 3.0},
        "step 2": {"held-out reward": 0.7, "judge": 0.4, "error (px)": 2.0},
        "after": {"held-out reward": 0.9, "judge": 0.1, "error (px)": 1.0},
    }
    shown = replace(run, evaluation=moments)
    assert held_out_series(shown)["judge"] == [(0, 0.2), (2, 0.4), (4, 0.1)]
    page = render([shown])
    card = page[page.index("metrics from 0 to 1") :].partition("</div>")[0]
    assert card.count("faint") == 2
    assert "held-out reward, step 4: 0.9" in card
    assert "judge, step 4: 0.1" in card
    assert "metrics from 0 to 1" not in render([run])  # evaluated before and after only


def test_what_a_model_wrote_cannot_run_in_a_browser(run_dir: Path):
    run = read_run(run_dir)
    sample = {**run.samples[-1], "completion": "<script>alert(1)</script><img src=x onerror=alert(1)>"}
    elements = read(render([replace(run, name="<b>run</b>", samples=[sample])]))
    assert not {"script", "b"} & elements.kinds
    assert all(address.startswith("data:image/") for address in elements.fetched)
    assert "<script>alert(1)</script><img src=x onerror=alert(1)>" in elements.text


def test_several_runs_share_their_axes(run_dir: Path):
    run = read_run(run_dir)
    page = render([run, replace(run, name="again")])
    assert page.count("<polyline") > 1.8 * render([run]).count("<polyline")
    assert "again" in read(page).text


def test_the_command_writes_into_the_run_folder(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["report", str(run_dir), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["page"] == str(run_dir / "report.html")
    assert printed["bytes"] == len((run_dir / "report.html").read_bytes())


def test_a_folder_without_a_run_and_an_unwritable_file_are_refused(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert main(["report", str(run_dir), "--out", str(tmp_path / "no" / "page.html")]) == 2
    assert "--out" in capsys.readouterr().err


def test_a_run_killed_within_a_line_is_shown_up_to_its_last_complete_step(run_dir: Path, tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text((run_dir / "metrics.jsonl").read_text() + '{"step": 4, "rew')
    (tmp_path / "config.json").write_text("{}")
    assert len(read_run(tmp_path).steps) == 4
    assert read(render([read_run(tmp_path)])).kinds >= {"svg", "table"}
