"""Which reward functions are called, and how: the same settings in every workload. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from groupwise.core.errors import require, require_types

SETTING = "workload.rewards"


@dataclass(frozen=True)
class RewardFunctionsConfig:
    """Reward functions. Their weights are set with --reward.weights NAME WEIGHT."""

    functions: tuple[str, ...] = ()
    """name=module:function or name=file.py:function (TRL's signature, sync or async), or name=http(s)://host/path for
    a service; any number of them. Without a name, a function has its own."""
    timeout_s: float = 60.0
    """Time limit of one call of a function, or of one request to a service. Rewards that are not there by then are
    missing, not zero."""
    retries: int = 2
    """How often a failed request to a service is repeated."""
    backoff_s: float = 0.5
    """Pause before the first retry; doubled before each further one."""
    rows_per_request: int = 8
    """Most rollouts in one request to a service."""
    mib_per_request: float = 64.0
    """Most MiB in one request to a service: fewer rollouts where clips are large, but at least one."""
    shared_folder: Path | None = None
    """A folder that the services see by the same path. Clips are written there as .npy files, deleted after the
    answer, and requests name them instead of holding them."""

    def __post_init__(self) -> None:
        require_types(self, f"{SETTING}.")
        require(self.timeout_s > 0, f"{SETTING}.timeout_s", self.timeout_s, "above 0")
        require(self.retries >= 0, f"{SETTING}.retries", self.retries, "0 or more")
        require(self.backoff_s >= 0, f"{SETTING}.backoff_s", self.backoff_s, "0 or more")
        require(self.mib_per_request > 0, f"{SETTING}.mib_per_request", self.mib_per_request, "above 0")
        require(self.rows_per_request >= 1, f"{SETTING}.rows_per_request", self.rows_per_request, "at least 1")

    @property
    def sources(self) -> tuple[str, ...]:
        """The functions without the names that the user gave them."""
        return tuple(split_name(spec)[1] for spec in self.functions)


def split_name(spec: str) -> tuple[str, str]:
    """'name=source' as (name, source); the name is empty where none is given."""
    match = re.fullmatch(r"([^=:/]+)=(.+)", spec)
    return (match[1], match[2]) if match else ("", spec)
