"""This machine's estimator of a model: profiled once, kept, and the same for all processes here."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from groupwise.meter.estimator import Estimator
from groupwise.meter.machine import current_machine

_CACHE = "GROUPWISE_CACHE"


def own_estimator(key: str, make: Callable[[], Estimator], *, model: str, folder: Path | None = None) -> Estimator:
    """The estimator of this model on this machine, made only if there is none yet under this key.

    Ranks of one machine share it: one of them makes it while the others wait. Ranks of several machines would each find
    their own, so a run on many takes a file by name instead.
    """
    folder = folder or cache_folder() / "estimators"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{hashlib.blake2b(f'{key} {current_machine()}'.encode(), digest_size=8).hexdigest()}.json"
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            make().save(file)
    return Estimator.load(file, model=model)


def cache_folder() -> Path:
    """Where things that can be made again are kept: $GROUPWISE_CACHE, or ~/.cache/groupwise."""
    return Path(os.environ.get(_CACHE) or Path.home() / ".cache" / "groupwise")
