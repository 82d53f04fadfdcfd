"""Cached answers by (model, sample, knobs): in memory, and in SQLite for later runs and other processes.

A frozen model's answer depends on nothing else, so a cached one equals a new one. Writes to SQLite are atomic, also if
the process is killed, and several processes may share one file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from groupwise.core.errors import UserError
from groupwise.core.io.files import open_regular
from groupwise.core.io.imports import settings_are_trusted
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor, PrefixStates
from groupwise.workloads.controller.model.knobs import Knobs

AnswerKey = tuple[str, Knobs]
"""A sample's name and the knobs it was answered with."""

_TABLE = """create table if not exists answers (
    model text, sample text, tier text, insertion_position integer, top_k integer, blocks integer, tokens text,
    primary key (model, sample, tier, insertion_position, top_k, blocks)
) without rowid"""


class PrecomputedAnswers(Protocol):
    """Answers that are shipped with a model."""

    def get(self, sample: str, knobs: Knobs) -> tuple[int, ...] | None:
        """The answer to a sample in one configuration; None if the sample is not in the table."""
        ...

    def get_all(self, sample: str) -> Sequence[tuple[int, ...]] | None:
        """The answers in the order of `KnobOptions.configurations()`; None if the sample is not in the table."""
        ...


class AnswerCache:
    """The answers of one model. They outlive the process if the cache has a file."""

    def __init__(self, model: str, path: Path | None = None, *, precomputed: PrecomputedAnswers | None = None):
        self.model, self.precomputed = model, precomputed
        self._answers: dict[AnswerKey, tuple[int, ...]] = {}
        self._file = _open(path) if path is not None else None
        self._writable = settings_are_trusted()

    def lookup(self, keys: Iterable[AnswerKey]) -> dict[AnswerKey, tuple[int, ...]]:
        """The answers that are known, by key."""
        answers = ((key, self._get(key)) for key in keys)
        return {key: tokens for key, tokens in answers if tokens is not None}

    def store(self, answers: Mapping[AnswerKey, tuple[int, ...]]) -> None:
        """Keep new answers, on disk in one transaction."""
        self._answers.update(answers)
        if self._file is not None and self._writable:
            rows = [(*self._row(key), " ".join(map(str, tokens))) for key, tokens in answers.items()]
            with _transaction(self._file):
                self._file.executemany("insert or ignore into answers values (?, ?, ?, ?, ?, ?, ?)", rows)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _get(self, key: AnswerKey) -> tuple[int, ...] | None:
        precomputed = self.precomputed.get(*key) if self.precomputed is not None else None
        if precomputed is not None:
            return precomputed
        if key in self._answers or self._file is None:
            return self._answers.get(key)
        where = "model = ? and sample = ? and tier = ? and insertion_position = ? and top_k = ? and blocks = ?"
        row = self._file.execute(f"select tokens from answers where {where}", self._row(key)).fetchone()
        if row is None:
            return None
        self._answers[key] = tuple(map(int, row[0].split()))
        return self._answers[key]

    def _row(self, key: AnswerKey) -> tuple[str | int, ...]:
        sample, knobs = key
        return self.model, sample, knobs.tier, knobs.insertion_position, knobs.top_k, knobs.blocks


@contextmanager
def _transaction(file: sqlite3.Connection) -> Iterator[None]:
    """BEGIN IMMEDIATE avoids deadlock between readers that become writers."""
    file.execute("begin immediate")
    try:
        yield
    except BaseException:
        file.execute("rollback")
        raise
    file.execute("commit")


def _open(path: Path) -> sqlite3.Connection | None:
    if not settings_are_trusted():
        return _open_to_read(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = sqlite3.connect(path, timeout=60, isolation_level=None)
        with _transaction(file):
            file.execute(_TABLE)
        return file
    except (sqlite3.Error, OSError) as error:
        raise UserError(
            f"The file of cached answers {path} cannot be used ({error}). Name another file, or delete it: it can be"
            " computed again from the model."
        ) from error


def _open_to_read(path: Path) -> sqlite3.Connection | None:
    """The answers in a file that only a run's config.json names, where there are any: nothing is written."""
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    try:
        open_regular(path).close()
        file = sqlite3.connect(uri, uri=True, isolation_level=None)
        file.execute("select model, sample, tier, insertion_position, top_k, blocks, tokens from answers limit 1")
    except (sqlite3.Error, UserError):
        return None
    return file


def answer_with_cache(
    executor: Executor,
    cache: AnswerCache,
    requests: Sequence[AnswerRequest],
    *,
    prefix: PrefixStates | None = None,
    max_new_tokens: int = 1,
    stop_token: int | None = None,
) -> list[tuple[int, ...]]:
    """Tokens for every request, in order; new answers are computed together and stored.

    Requests whose prompt is in `prefix` continue from there. A cache belongs to one model and one stop rule: its name
    should tell both.
    """
    keys = [(request.sample.name, request.knobs) for request in requests]
    answers = cache.lookup(keys)
    missing = {key: request for key, request in zip(keys, requests, strict=True) if key not in answers}
    started = {
        key for key, request in missing.items() if prefix is not None and request.prompt_key in prefix.latency_tokens
    }
    for start, batch_keys in ((prefix, started), (None, missing.keys() - started)):
        batch = {key: request for key, request in missing.items() if key in batch_keys}
        if batch:
            computed, _ = executor.answer(
                list(batch.values()), prefix=start, max_new_tokens=max_new_tokens, stop_token=stop_token
            )
            new = {key: answer.tokens for key, answer in zip(batch, computed, strict=True)}
            cache.store(new)
            answers |= new
    return [answers[key] for key in keys]
