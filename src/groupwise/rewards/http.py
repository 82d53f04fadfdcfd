"""A reward from an HTTP service: retried, limited in time, and missing with its reason where it does not come.

POST {"prompts": [...], "completions": [array ...], "cameras": [array or null ...], ...}; the answer is {"rewards":
[number or null ...]}. Arrays travel as {"dtype": "uint8", "shape": [...], "base64": "..."}: clips as bytes (0 is -1,
255 is 1), channels first; all else as float32. Columns that JSON cannot say stay at home.
"""

from __future__ import annotations

import base64
import json
import numbers
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from groupwise.rewards.time_limit import with_time_limit


class ServiceError(Exception):
    """The service did not give rewards; the text says why."""


@dataclass(frozen=True)
class HttpReward:
    """A reward function of TRL's signature."""

    url: str
    timeout_s: float = 60.0
    """Longest wait for one whole answer, however many pieces it comes in."""
    retries: int = 2
    """Tries after the first."""
    pause_s: float = 0.5
    """Before the first retry; doubled before each further one."""
    rows_per_request: int = 8

    def __call__(self, prompts: Sequence[str], completions: Sequence[Tensor], **columns: Any) -> list[float | None]:
        found: list[float | None] = []
        failure: ServiceError | None = None
        for start in range(0, len(completions), self.rows_per_request):
            part = slice(start, start + self.rows_per_request)
            clips = completions[part]
            told = {"prompts": list(prompts[part]), "completions": [_encode_clip(clip) for clip in clips]}
            told |= {name: _to_json(column[part]) for name, column in columns.items() if _is_sendable(column[part])}
            try:
                found += self._ask(json.dumps(told).encode(), len(clips))
            except ServiceError as error:  # these rows are missing; the others have their rewards
                failure, found = error, [*found, *[None] * len(clips)]
        if failure is not None and all(reward is None for reward in found):
            raise failure
        return found

    def _ask(self, body: bytes, rows: int) -> list[float | None]:
        reason = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.pause_s * 2 ** (attempt - 1))
            try:
                return _rewards(self._post(body), rows)
            except (OSError, ValueError, ServiceError) as error:  # URLError and time-outs are OSErrors
                reason = f"{type(error).__name__}: {error}"
        raise ServiceError(f"{self.url} gave no rewards in {self.retries + 1} tries; the last: {reason}")

    def _post(self, body: bytes) -> bytes:
        told = f"timed out: no whole answer in {self.timeout_s:g} s"
        content: bytes = with_time_limit(self._exchange, self.timeout_s, told)(body)
        return content

    def _exchange(self, body: bytes) -> bytes:
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
            content: bytes = answer.read()
        return content


def _rewards(answer: bytes, rows: int) -> list[float | None]:
    """The numbers of an answer; anything else is refused, never read as zero."""
    content = json.loads(answer)
    rewards = content.get("rewards") if isinstance(content, dict) else None
    if not isinstance(rewards, list) or len(rewards) != rows:
        raise ServiceError(f'the answer must be {{"rewards": [{rows} numbers]}}, not {answer[:80]!r}')
    for value in rewards:
        if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
            raise ServiceError(f"a reward must be a number or null, not {value!r}")
    return rewards


def _encode_clip(clip: Tensor) -> dict[str, Any]:
    return _array(((clip.clamp(-1, 1) + 1) * 127.5).round().byte())


def _array(tensor: Tensor) -> dict[str, Any]:
    tensor = tensor.detach().cpu().contiguous()
    raw = base64.b64encode(tensor.numpy().tobytes()).decode()
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "base64": raw}


def _is_sendable(column: Sequence[Any]) -> bool:
    return all(entry is None or isinstance(entry, str | int | float | Tensor) for entry in column)


def _to_json(column: Sequence[Any]) -> list[Any]:
    return [_array(entry.float()) if isinstance(entry, Tensor) else entry for entry in column]
