"""Precomputed answers of the embedded model: every question of the recipe's splits under every configuration.

Rebuilt by `python -m tools.mosaic answer-table`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from groupwise.core.groups import content_hash
from groupwise.workloads.controller.model.knobs import KnobOptions, Knobs
from groupwise.workloads.controller.tasks.mosaic.model import ASSET, load_other_drop_orders, mosaic_options

TABLE = "answers.npz"


@dataclass(frozen=True)
class AnswerTable:
    """Answers of one token by sample."""

    rows: Mapping[str, int]
    """Row of each sample, by name."""
    columns: Mapping[Knobs, int]
    """Column of every configuration."""
    tokens: UInt8[np.ndarray, "samples columns"]

    def get(self, sample: str, knobs: Knobs) -> tuple[int, ...] | None:
        row = self.rows.get(sample)
        return None if row is None else (int(self.tokens[row, self.columns[knobs]]),)

    def get_all(self, sample: str) -> Sequence[tuple[int, ...]] | None:
        """In the order of `KnobOptions.configurations()`."""
        row = self.rows.get(sample)
        if row is None:
            return None
        tokens = [(token,) for token in self.tokens[row].tolist()]
        return [tokens[column] for column in self.columns.values()]


def save_answer_table(
    names: Sequence[str],
    tokens: UInt8[np.ndarray, "samples configurations"],
    other_tokens: Sequence[UInt8[np.ndarray, "samples other_configurations"]] = (),
    folder: Path = ASSET,
) -> Path:
    """Write the answers of the model in this folder beside its weights, also those under its other drop orders."""
    path = folder / TABLE
    raw = np.frombuffer(bytes.fromhex("".join(names)), np.uint8).reshape(len(names), -1)
    others = np.stack(other_tokens) if other_tokens else np.zeros((0, len(names), 0), np.uint8)
    np.savez_compressed(path, model=np.array(fingerprint(folder)), names=raw, tokens=tokens, other_tokens=others)
    return path


def load_answer_table(options: KnobOptions, folder: Path = ASSET) -> AnswerTable | None:
    """The precomputed answers of the model in this folder; None if there are none, or if they are another model's."""
    saved = _load(folder)
    if saved is None:
        return None
    columns = {knobs: index for index, knobs in enumerate(options.configurations())}
    return AnswerTable(saved.rows, columns, saved.tokens)


@dataclass(frozen=True)
class PartialAnswerTable:
    """Answers under another drop order, at the first insertion position alone."""

    table: AnswerTable
    configurations: Sequence[Knobs]
    """Of the model, whether they are in the table or not."""

    def get_all(self, sample: str) -> Sequence[tuple[int, ...] | None] | None:
        if sample not in self.table.rows:
            return None
        known = self.table.columns
        return [self.table.get(sample, knobs) if knobs in known else None for knobs in self.configurations]


def load_other_answers(options: KnobOptions, folder: Path = ASSET) -> dict[tuple[int, ...], PartialAnswerTable]:
    """The precomputed answers by other drop orders."""
    saved = _load(folder)
    if saved is None:
        return {}
    tables, configurations = {}, list(options.configurations())
    for order, tokens in zip(load_other_drop_orders(folder), saved.other_tokens, strict=True):
        columns = {knobs: index for index, knobs in enumerate(options_of_other_order(order, options).configurations())}
        tables[order] = PartialAnswerTable(AnswerTable(saved.rows, columns, tokens), configurations)
    return tables


def options_of_other_order(order: Sequence[int], options: KnobOptions | None = None) -> KnobOptions:
    """The configurations that are precomputed for another drop order than the model's own."""
    options = options or mosaic_options()
    return replace(options, drop_order=tuple(order), insertion_positions=options.insertion_positions[:1])


@dataclass(frozen=True)
class _Saved:
    rows: Mapping[str, int]
    tokens: UInt8[np.ndarray, "samples configurations"]
    other_tokens: UInt8[np.ndarray, "orders samples other_configurations"]


def _load(folder: Path) -> _Saved | None:
    path = folder / TABLE
    if not path.is_file():
        return None
    with np.load(path) as saved:
        if str(saved["model"]) != fingerprint(folder):
            return None
        rows = {row.tobytes().hex(): index for index, row in enumerate(saved["names"])}
        return _Saved(rows, saved["tokens"], saved["other_tokens"])


def fingerprint(folder: Path = ASSET) -> str:
    """Identifies the weights and the drop order, so that answers of another model are never used."""
    files = [(folder / name).read_bytes() for name in ("model.safetensors", "importance.json")]
    return content_hash(*files, digest_size=8)
