"""A reward function behind an HTTP service: batches, retries, a time limit for the whole answer.

POST {"prompts": [...], "completions": [...], COLUMN: [...], ...}; the answer is {"rewards": [number or null ...]}.
Texts, messages and other columns travel as JSON. Clips and images as completions are bytes (0 is -1, 255 is 1),
channels first, and all other tensors are float32: {"dtype": "uint8", "shape": [...], "base64": "..."}. A column with
a value that JSON cannot hold is not sent.
"""

from __future__ import annotations

import base64
import json
import math
import numbers
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from torch import Tensor

from groupwise.core.files import MAX_JSON_BYTES, parse_json
from groupwise.core.units import format_bytes
from groupwise.rewards.time_limit import with_time_limit

_LARGEST = 2**1023
"""Larger whole numbers are no float64."""


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

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        content: dict[str, list[Any]] = {
            "prompts": [_to_json(prompt) for prompt in prompts],
            "completions": [_encode_completion(completion) for completion in completions],
        }
        for name, column in columns.items():
            try:
                content[name] = [_to_json(value) for value in column]
            except TypeError:  # only functions of this process can use it
                continue
        rewards: list[float | None] = []
        failure: ServiceError | None = None
        for start in range(0, len(completions), self.rows_per_request):
            rows = {name: column[start : start + self.rows_per_request] for name, column in content.items()}
            count = len(rows["completions"])
            try:
                rewards += self._request_with_retries(json.dumps(rows).encode(), count)
            except ServiceError as error:  # these rows are missing; the others have their rewards
                failure, rewards = error, [*rewards, *[None] * count]
        if failure is not None and all(reward is None for reward in rewards):
            raise failure
        return rewards

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
        return answer

    def _post_once(self, body: bytes) -> bytes:
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
            answer: bytes = response.read(MAX_JSON_BYTES + 1)
        if len(answer) > MAX_JSON_BYTES:
            raise ServiceError(f"the answer has more than {format_bytes(MAX_JSON_BYTES)}")
        return answer


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


def _encode_completion(completion: Any) -> Any:
    return _encode_clip(completion) if isinstance(completion, Tensor) else _to_json(completion)


def _encode_clip(clip: Tensor) -> dict[str, Any]:
    return _encode_tensor(((clip.clamp(-1, 1) + 1) * 127.5).round().byte())


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
