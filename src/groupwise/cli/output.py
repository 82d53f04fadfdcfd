"""What goes to stdout and what to stderr, and arguments whose mistakes can be told in one sentence."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from typing import Any, TypeVar

import tyro

from groupwise.core.errors import UserError

T = TypeVar("T")


class ArgumentError(UserError):
    """A mistake in the arguments that has been shown to the user already."""


def parse(kind: type[T], words: list[str], *, prog: str, description: str | None = None, default: T | None = None) -> T:
    """The arguments as a record; a mistake is shown as tyro draws it, and kept as a sentence for `--json`."""
    shown = io.StringIO()
    more: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with redirect_stderr(shown):
            return tyro.cli(kind, args=words, prog=prog, description=description, **more)
    except SystemExit as leaving:
        print(shown.getvalue(), end="", file=sys.stderr)
        if not leaving.code:
            raise
        sentence = " ".join(re.sub("[\u2500-\u257f]", " ", shown.getvalue()).split())
        raise ArgumentError(sentence.split("For full helptext")[0].strip()) from None


def print_json(content: Mapping[str, Any]) -> None:
    """The one object on stdout; of several ranks, only the first speaks."""
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(content))


def quiet_stdout(as_json: bool) -> Any:
    """What a user's own code prints must not stand beside the one JSON object."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()
