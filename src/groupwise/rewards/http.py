"""A reward function behind an HTTP service: batches, retries, a time limit for the whole answer.

POST {"prompts": [...], "completions": [...], COLUMN: [...], ...}; the answer is {"rewards": [number or null ...]}.
Texts, messages and other columns travel as JSON. Clips and images (completions and `sources`) are bytes (0 is -1, 255
is 1), channels first, and all other tensors are float32: {"dtype": "uint8", "shape": [...], "base64": "..."}, or with
"path" instead of "base64" a .npy file in a folder that both see. A column with a value that JSON cannot hold is not
sent.
"""

from __future__ import annotations

import base64
import json
import math
import numbers
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from groupwise.core.io.files import parse_json
from groupwise.core.io.progress import advance
from groupwise.rewards.time_limit import with_time_limit

_LARGEST = 2**1023
"""Larger whole numbers are no float64."""
CLIP_COLUMNS = ("completions", "sources")
"""Tensors in these are clips or images in -1..1."""
ClipEncoder = Callable[[Tensor], dict[str, Any]]
_MAX_ANSWER_BYTES = 4 << 20


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """An answer that sends elsewhere is an error: what is asked for, or seen, there was not named by the user."""

    def redirect_request(self, *_: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirects)


class ServiceError(Exception):
    """The service did not give rewards; the text says why."""


@dataclass(frozen=True)
class HttpReward:
    """A reward function of TRL's signature."""

    url: str
    timeout_s: float = 60.0
    """Longest wait for one whole answer, however many packets it comes in."""
    retries: int = 2
    backoff_s: float = 0.5
    """Pause before the first retry; doubled before each further one."""
    rows_per_request: int = 8
    bytes_per_request: int = 64 << 20
    """Fewer rows where this many bytes are reached; a single row may have more."""
    shared_folder: Path | None = None
    """Clips are files there instead of being in the request."""

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        rows = _Rows({"prompts": prompts, "completions": completions, **columns})
        rewards: list[float | None] = []
        failure: ServiceError | None = None
        with _clip_encoder(self.shared_folder) as encode_clip:
            for body, count in self._requests(rows, encode_clip):
                try:
                    rewards += self._request_with_retries(body, count)
                except ServiceError as error:  # these rows are missing; the others have their rewards
                    failure, rewards = error, [*rewards, *[None] * count]
        if failure is not None and all(reward is None for reward in rewards):
            raise failure
        return rewards

    def _requests(self, rows: _Rows, encode_clip: ClipEncoder) -> Iterator[tuple[bytes, int]]:
        """Bodies of requests and their numbers of rows. Rows are encoded one after the other, as they are sent."""
        batch: list[dict[str, str]] = []
        size = 0
        for index in range(len(rows)):
            row = rows.encode(index, encode_clip)
            row_bytes = sum(map(len, row.values()))
            if batch and (len(batch) == self.rows_per_request or size + row_bytes > self.bytes_per_request):
                yield _body(batch), len(batch)
                batch, size = [], 0
            batch.append(row)
            size += row_bytes
        if batch:
            yield _body(batch), len(batch)

    def _request_with_retries(self, body: bytes, rows: int) -> list[float | None]:
        reason = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.backoff_s * 2 ** (attempt - 1))
            try:
                return _parse_rewards(self._request(body), rows)
            except (OSError, ValueError, HTTPException, ServiceError) as error:  # URLError and timeouts are OSErrors
                reason = f"{type(error).__name__}: {error}"
        raise ServiceError(f"{self.url} gave no rewards in {self.retries + 1} tries; the last: {reason}")

    def _request(self, body: bytes) -> bytes:
        message = f"timed out: no whole answer in {self.timeout_s:g} s"
        answer: bytes = with_time_limit(self._post_once, self.timeout_s, message)(body)
        advance()
        return answer

    def _post_once(self, body: bytes) -> bytes:
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        with _opener.open(request, timeout=self.timeout_s) as response:
            answer: bytes = response.read(_MAX_ANSWER_BYTES + 1)
        if len(answer) > _MAX_ANSWER_BYTES:
            limit = f"{_MAX_ANSWER_BYTES >> 20} MiB"
            raise ServiceError(f"the answer has more than {limit}, and rewards are a few numbers")
        return answer


class _Rows:
    """The columns of all rows; one with a value that JSON cannot hold is left out."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]):
        self._columns = dict(columns)
        for name, column in columns.items():
            if name not in CLIP_COLUMNS and not all(map(_has_json, column)):
                del self._columns[name]

    def __len__(self) -> int:
        return len(self._columns["completions"])

    def encode(self, index: int, encode_clip: ClipEncoder) -> dict[str, str]:
        """One row, as JSON by column. Columns of clips are read here, so that one is in memory at a time."""
        row = {}
        for name, column in self._columns.items():
            value = column[index]
            is_clip = name in CLIP_COLUMNS and isinstance(value, Tensor)
            row[name] = json.dumps(encode_clip(value) if is_clip else _to_json(value))
        return row


def _body(batch: Sequence[Mapping[str, str]]) -> bytes:
    columns = (f"{json.dumps(name)}: [{', '.join(row[name] for row in batch)}]" for name in batch[0])
    return f"{{{', '.join(columns)}}}".encode()


@contextmanager
def _clip_encoder(folder: Path | None) -> Iterator[ClipEncoder]:
    """Clips as base64, or as files of a folder that exist within."""
    if folder is None:
        yield lambda clip: _encode_tensor(_to_bytes(clip))
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="clips-", dir=folder) as own:

            def write(clip: Tensor) -> dict[str, Any]:
                pixels = _to_bytes(clip)
                path = Path(own) / f"{uuid.uuid4().hex}.npy"
                np.save(path, pixels.numpy())
                return {"dtype": "uint8", "shape": list(pixels.shape), "path": str(path.resolve())}

            yield write
    except OSError as error:
        raise ServiceError(f"clips cannot be written to the shared folder {folder} ({error})") from error


def _parse_rewards(answer: bytes, rows: int) -> list[float | None]:
    """The numbers of an answer; anything else is refused, never read as zero."""
    content = parse_json(answer)
    rewards = content.get("rewards") if isinstance(content, dict) else None
    if not isinstance(rewards, list) or len(rewards) != rows:
        raise ServiceError(f'the answer must be {{"rewards": [{rows} numbers]}}, not {answer[:80]!r}')
    for value in rewards:
        if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
            raise ServiceError(f"a reward must be a number or null, not {str(value)[:80]!r}")
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise ServiceError(f"a reward has {len(str(value))} digits")
    return rewards


def _to_bytes(clip: Tensor) -> Tensor:
    """-1..1 to bytes."""
    return ((clip.detach().cpu().clamp(-1, 1) + 1) * 127.5).round().byte().contiguous()


def _has_json(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_has_json, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_has_json, value))
    return value is None or isinstance(value, str | int | float | Tensor)


def _encode_tensor(tensor: Tensor) -> dict[str, Any]:
    tensor = tensor.detach().cpu().contiguous()
    raw = base64.b64encode(tensor.numpy().tobytes()).decode()
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "base64": raw}


def _to_json(value: Any) -> Any:
    """The value as JSON has it; NaN is null."""
    if isinstance(value, Tensor):
        return _encode_tensor(value.float())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): _to_json(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(entry) for entry in value]
    raise TypeError(f"{type(value).__name__} has no form in JSON")
