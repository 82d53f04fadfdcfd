"""The file of an estimator: few numbers, in JSON that people can read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupwise.core.errors import UserError

_FORMAT = "groupwise latency estimator 1"
_FIELDS = {"prices", "never_seen", "ratios", "model", "machine", "quantile", "differs"}


def write(path: Path, fields: Mapping[str, Any]) -> None:
    """Whole or not at all; floats come back bit by bit."""
    assert set(fields) == _FIELDS
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    draft.write_text(json.dumps({"format": _FORMAT, **fields}, indent=1, allow_nan=False) + "\n")
    os.replace(draft, path)


def read(path: Path) -> dict[str, Any]:
    """The fields; refused if there is no such file or it holds something else."""
    if not path.is_file():
        raise UserError(f"There is no estimator in {path}: profile the model and save one, or name another file.")
    try:
        held = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}). Delete it, profile and save the estimator again.") from error
    if not isinstance(held, dict) or held.pop("format", None) != _FORMAT or set(held) != _FIELDS:
        raise UserError(f"{path} does not hold a {_FORMAT}. Name another file, or profile and save one.")
    return held
