"""`groupwise report RUN [RUN ...]`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from groupwise.cli.arguments import parse, print_json
from groupwise.core.errors import UserError
from groupwise.core.io.files import write_atomic
from groupwise.report.page import render
from groupwise.report.run_data import read_run


@dataclass(frozen=True)
class ReportArguments:
    """Write one self-contained HTML page about a run, or about several side by side. Works during training too.

    Try: groupwise report runs/chat
    """

    run_dirs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="(required)"),
    ]
    """Run folders, such as runs/chat."""
    out: Annotated[
        Path | None,
        tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: report.html in the first run's folder)"),
    ] = None
    """Where to write the page."""


def run(arguments: list[str], as_json: bool) -> int:
    options = parse(ReportArguments, arguments, prog="groupwise report")
    if not options.run_dirs:
        raise UserError("No run was named. Name the folder of at least one, such as `groupwise report runs/chat`.")
    page = render([read_run(path, _warn) for path in options.run_dirs]).encode("utf-8", "replace")
    out = options.out or options.run_dirs[0] / "report.html"
    try:
        if options.out is None:
            write_atomic(out, page)  # never through a link that somebody has put into the folder
        else:
            out.write_bytes(page)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}). Name another file with --out.") from error
    num_bytes = len(page)
    if as_json:
        print_json({"page": str(out), "runs": [str(path) for path in options.run_dirs], "bytes": num_bytes})
    else:
        print(f"{out}: open it in a browser ({num_bytes / 1024:.0f} KiB, works offline).")
    return 0


def _warn(text: str) -> None:
    print(f"Warning: {text}", file=sys.stderr)
