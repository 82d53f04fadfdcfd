"""Answers already known, by (model, sample, knobs): in memory, and on disk for later runs and other processes.

A frozen model's answer depends on nothing else, so a remembered one is as good as a new one. On disk it is SQLite: each
answer is written whole or not at all, also when the process is killed, and several processes may share one file.
The executor with a memory: what is known is not computed again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from groupwise.core.errors import UserError
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor, PrefixStates
from groupwise.workloads.controller.model.knobs import Knobs

AnswerKey = tuple[str, Knobs]
"""A sample's name and the knobs it was answered with."""

_TABLE = """create table if not exists answers (
    model text, sample text, tier text, insertion_position integer, top_k integer, blocks integer, tokens text,
    primary key (model, sample, tier, insertion_position, top_k, blocks)
) without rowid"""


class PrecomputedAnswers(Protocol):
    """Answers that come with a model."""

    def one(self, sample: str, knobs: Knobs) -> tuple[int, ...] | None:
        """The answer to a sample under some knobs, if it is among them."""
        ...

    def every(self, sample: str) -> Sequence[tuple[int, ...]] | None:
        """The answers to a sample under all knobs, in the order of `KnobOptions.all()`, if it is among them."""
        ...


class AnswerCache:
    """A dictionary of answers of one model that outlives the process if it has a file."""

    def __init__(self, model: str, path: Path | None = None, *, shipped: PrecomputedAnswers | None = None):
        self.model, self.shipped = model, shipped
        self._known: dict[AnswerKey, tuple[int, ...]] = {}
        self._file = _open(path) if path is not None else None

    def known(self, keys: Iterable[AnswerKey]) -> dict[AnswerKey, tuple[int, ...]]:
        """Those of the keys that have an answer."""
        looked_up = ((key, self._look_up(key)) for key in keys)
        return {key: tokens for key, tokens in looked_up if tokens is not None}

    def remember(self, answers: Mapping[AnswerKey, tuple[int, ...]]) -> None:
        """Keep new answers; all of them reach the disk together."""
        self._known.update(answers)
        if self._file is not None:
            rows = [(*self._row(key), " ".join(map(str, tokens))) for key, tokens in answers.items()]
            with _writing(self._file):
                self._file.executemany("insert or ignore into answers values (?, ?, ?, ?, ?, ?, ?)", rows)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _look_up(self, key: AnswerKey) -> tuple[int, ...] | None:
        shipped = self.shipped.one(*key) if self.shipped is not None else None
        if shipped is not None:
            return shipped
        if key in self._known or self._file is None:
            return self._known.get(key)
        where = "model = ? and sample = ? and tier = ? and insertion_position = ? and top_k = ? and blocks = ?"
        row = self._file.execute(f"select tokens from answers where {where}", self._row(key)).fetchone()
        if row is None:
            return None
        self._known[key] = tuple(map(int, row[0].split()))
        return self._known[key]

    def _row(self, key: AnswerKey) -> tuple[str | int, ...]:
        sample, knobs = key
        return self.model, sample, knobs.tier, knobs.insertion_position, knobs.top_k, knobs.blocks


@contextmanager
def _writing(file: sqlite3.Connection) -> Iterator[None]:
    """All or nothing. The lock is taken at once: one who reads first and then wants to write is not made to wait."""
    file.execute("begin immediate")
    try:
        yield
    except BaseException:
        file.execute("rollback")
        raise
    file.execute("commit")


def _open(path: Path) -> sqlite3.Connection:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = sqlite3.connect(path, timeout=60, isolation_level=None)
        with _writing(file):
            file.execute(_TABLE)
        return file
    except (sqlite3.Error, OSError) as error:
        raise UserError(
            f"The file of remembered answers {path} cannot be used ({error}). Name another file, or delete it: it can"
            " be made again from the model."
        ) from error


def answer_with_cache(
    executor: Executor,
    answers: AnswerCache,
    requests: Sequence[AnswerRequest],
    *,
    prefix: PrefixStates | None = None,
    max_new_tokens: int = 1,
    stop_token: int | None = None,
) -> list[tuple[int, ...]]:
    """Tokens for every request, in order; new ones are computed together and remembered.

    Those that a prefix pass has begun go on from there. `answers` belongs to one model and one way to stop: its name
    should tell both.
    """
    keys = [(request.sample.name, request.knobs) for request in requests]
    known = answers.known(keys)
    missing = {key: request for key, request in zip(keys, requests, strict=True) if key not in known}
    begun = {key for key, request in missing.items() if prefix is not None and request.head in prefix.latency_tokens}
    for start, part in ((prefix, begun), (None, missing.keys() - begun)):
        asked = {key: request for key, request in missing.items() if key in part}
        if asked:
            found, _ = executor.answer(
                list(asked.values()), prefix=start, max_new_tokens=max_new_tokens, stop_token=stop_token
            )
            new = {key: answer.tokens for key, answer in zip(asked, found, strict=True)}
            answers.remember(new)
            known |= new
    return [known[key] for key in keys]
