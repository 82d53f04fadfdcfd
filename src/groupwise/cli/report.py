"""`groupwise report RUN [RUN ...]`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from groupwise.cli.arguments import parse, print_json
from groupwise.core.errors import UserError
from groupwise.report.page import render
from groupwise.report.run_data import read_run


@dataclass(frozen=True)
class ReportArguments:
    """Write one self-contained HTML page about a run, or about several side by side; also while they train."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders, such as runs/chat."""
    out: Path | None = None
    """The page; report.html in the first run's folder unless you say otherwise."""


def run(words: list[str], as_json: bool) -> int:
    arguments = parse(ReportArguments, words, prog="groupwise report")
    if not arguments.run_dirs:
        raise UserError("No run was named. Name the folder of at least one, such as `groupwise report runs/chat`.")
    page = render([read_run(path) for path in arguments.run_dirs])
    out = arguments.out or arguments.run_dirs[0] / "report.html"
    try:
        out.write_text(page)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}). Choose another place with --out.") from error
    if as_json:
        print_json({"page": str(out), "runs": [str(path) for path in arguments.run_dirs], "bytes": len(page.encode())})
    else:
        print(f"{out}: open it in a browser ({len(page.encode()) / 1024:.0f} KiB, needs nothing else).")
    return 0
