"""Precomputed answers of the embedded model: every question of the recipe's splits under every configuration.

Rebuilt by `python -m tools.mosaic answer-table`.
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
    """Row of each sample, by name."""
    columns: Mapping[Knobs, int]
    tokens: UInt8[np.ndarray, "samples configurations"]

    def get(self, sample: str, knobs: Knobs) -> tuple[int, ...] | None:
        row = self.rows.get(sample)
        return None if row is None else (int(self.tokens[row, self.columns[knobs]]),)

    def get_all(self, sample: str) -> Sequence[tuple[int, ...]] | None:
        row = self.rows.get(sample)
        return None if row is None else [(token,) for token in self.tokens[row].tolist()]


def save_answer_table(
    names: Sequence[str], tokens: UInt8[np.ndarray, "samples configurations"], folder: Path = ASSET
) -> Path:
    """Write the answers of the model in this folder beside its weights."""
    path = folder / TABLE
    raw = np.frombuffer(bytes.fromhex("".join(names)), np.uint8).reshape(len(names), -1)
    np.savez_compressed(path, model=np.array(fingerprint(folder)), names=raw, tokens=tokens)
    return path


def load_answer_table(options: KnobOptions, folder: Path = ASSET) -> AnswerTable | None:
    """The precomputed answers of the model in this folder; None if there are none, or if they are another model's."""
    path = folder / TABLE
    if not path.is_file():
        return None
    with np.load(path) as saved:
        if str(saved["model"]) != fingerprint(folder):
            return None
        names, tokens = saved["names"], saved["tokens"]
    return AnswerTable(
        {row.tobytes().hex(): index for index, row in enumerate(names)},
        {knobs: index for index, knobs in enumerate(options.configurations())},
        tokens,
    )


def fingerprint(folder: Path = ASSET) -> str:
    """Identifies the weights and the drop order, so that answers of another model are never used."""
    files = [(folder / name).read_bytes() for name in ("model.safetensors", "importance.json")]
    return content_hash(*files, digest_size=8)
