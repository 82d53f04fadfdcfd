"""The shipped table of remembered answers: every question of the controller's parts under every configuration.

Rebuilt by scripts/remember_mosaic.py; a test asks the model for random entries again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from groupwise.core.groups import content_hash
from groupwise.workloads.controller.model.knobs import KnobOptions, Knobs
from groupwise.workloads.controller.tasks.mosaic.model import ASSET

TABLE = "answers.npz"


@dataclass(frozen=True)
class AnswerTable:
    """Answers of one token by sample, in the order of `KnobOptions.configurations()`."""

    rows: Mapping[str, int]
    """From the name of a sample to its row."""
    columns: Mapping[Knobs, int]
    tokens: UInt8[np.ndarray, "samples configurations"]

    def get(self, sample: str, knobs: Knobs) -> tuple[int, ...] | None:
        row = self.rows.get(sample)
        return None if row is None else (int(self.tokens[row, self.columns[knobs]]),)

    def get_all(self, sample: str) -> Sequence[tuple[int, ...]] | None:
        row = self.rows.get(sample)
        return None if row is None else [(token,) for token in self.tokens[row].tolist()]


def save_remembered(
    names: Sequence[str], tokens: UInt8[np.ndarray, "samples configurations"], folder: Path = ASSET
) -> Path:
    """Write the answers of the model in this folder beside it."""
    path = folder / TABLE
    raw = np.frombuffer(bytes.fromhex("".join(names)), np.uint8).reshape(len(names), -1)
    np.savez_compressed(path, model=np.array(fingerprint(folder)), names=raw, tokens=tokens)
    return path


def load_answer_table(options: KnobOptions, folder: Path = ASSET) -> AnswerTable | None:
    """Return what is remembered of the model in this folder, or None: answers of another model are of no use."""
    path = folder / TABLE
    if not path.is_file():
        return None
    with np.load(path) as kept:
        if str(kept["model"]) != fingerprint(folder):
            return None
        names, tokens = kept["names"], kept["tokens"]
    return AnswerTable(
        {row.tobytes().hex(): number for number, row in enumerate(names)},
        {knobs: number for number, knobs in enumerate(options.configurations())},
        tokens,
    )


def fingerprint(folder: Path = ASSET) -> str:
    """Tell one trained model from the next, so that answers of an older one are never taken for its own."""
    files = [(folder / name).read_bytes() for name in ("model.safetensors", "importance.json")]
    return content_hash(*files, digest_size=8)
