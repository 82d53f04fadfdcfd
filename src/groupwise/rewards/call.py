"""`call_rewards`: calls sync and async reward functions of TRL's signature; a failed one leaves its rewards missing."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from groupwise.core.errors import UserError, is_out_of_memory
from groupwise.core.io.user_code import contain_exits, without_exit
from groupwise.core.types import RewardTerms

_GRACE_S = 1.0
"""Between the time limit of an async function and the moment when it is given up from outside."""
RewardFunction = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]
"""`def reward(prompts, completions, **columns) -> list[float]`: one number per row, None (or NaN) for "no reward"."""


def call_rewards(
    functions: Mapping[str, RewardFunction], prompts: Sequence[Any], completions: Sequence[Any], /, **columns: Any
) -> RewardTerms:
    """All functions on all rows; the async ones run together."""
    arguments = {"prompts": prompts, "completions": completions, **columns}
    results = {name: _call(partial(function, **arguments)) for name, function in functions.items()}
    results |= _await_all({name: result for name, result in results.items() if inspect.isawaitable(result)})
    rewards = {name: _as_rewards(name, result, len(completions)) for name, result in results.items()}
    return RewardTerms(
        {name: values for name, (values, _) in rewards.items()},
        {name: reason for name, (_, reason) in rewards.items() if reason},
    )


@dataclass(frozen=True)
class _FailedReward:
    """Takes the place of a result: only what a function raises itself counts as a failure."""

    reason: str


def _call(call: Callable[[], Any]) -> Any:
    try:
        with contain_exits():
            return call()
    except Exception as error:  # a user's function may raise anything; the policy for it is in the config
        if is_out_of_memory(error):  # not the function's fault: the stage is repeated with fewer rows
            raise
        return _FailedReward(_reason(error))


def _await_all(waiting: Mapping[str, Awaitable[Any]]) -> dict[str, Any]:
    async def await_one(result: Awaitable[Any]) -> Any:
        try:
            return await without_exit(result)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return _FailedReward(_reason(error))

    async def await_all() -> list[Any]:
        return await asyncio.gather(*map(await_one, waiting.values()))

    if not waiting:
        return {}
    return dict(zip(waiting, _in_a_thread(lambda: asyncio.run(await_all()), waiting), strict=True))


def _in_a_thread(call: Callable[[], list[Any]], waiting: Mapping[str, Awaitable[Any]]) -> list[Any]:
    """This thread may run an event loop already, as in a notebook.

    A function that blocks the event loop also blocks its time limit: then all are given up, and the thread is left
    behind, which does not keep the process alive.
    """
    results: list[list[Any] | Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001 - raised again below
            results.append(error)

    limits = [getattr(result, "timeout_s", math.inf) for result in waiting.values()]
    thread = threading.Thread(target=run, daemon=True)
    with contain_exits():
        thread.start()
        thread.join(None if math.inf in limits else max(limits) + _GRACE_S)
    if not results:
        return [_FailedReward(f"blocked the event loop for {max(limits):g} s: it must await, not wait")] * len(waiting)
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def _as_rewards(name: str, result: Any, rows: int) -> tuple[Tensor, str | None]:
    if isinstance(result, _FailedReward):
        return torch.full((rows,), torch.nan, dtype=torch.float64), result.reason
    if hasattr(result, "tolist") and getattr(result, "ndim", 0) == 1:  # a tensor or an array
        result = result.tolist()
    if isinstance(result, str | bytes) or not isinstance(result, Sequence):
        raise UserError(
            f"Reward '{name}' returned {type(result).__name__}: it must return a list with one number for each of its"
            f" {rows} rows."
        )
    if len(result) != rows:
        raise UserError(
            f"Reward '{name}' returned {len(result)} values for {rows} rows: it must return exactly one number per row,"
            " in their order (None where there is no reward)."
        )
    values = torch.tensor([_number(name, row, value) for row, value in enumerate(result)], dtype=torch.float64)
    missing = ~values.isfinite()
    if not missing.any():
        return values, None
    invalid = [result[row] for row in missing.nonzero().flatten().tolist()]
    reason = f"returned {invalid[0]} for {len(invalid)} of {rows} rows"
    return values.masked_fill(missing, torch.nan), reason


def _number(name: str, row: int, value: Any) -> float:
    if value is None:
        return float("nan")
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.item())
    if not isinstance(value, numbers.Real):
        raise UserError(
            f"Reward '{name}' returned {value!r} ({type(value).__name__}) for row {row}: a reward is a number, or None"
            " where there is none."
        )
    return float(value)


def _reason(error: Exception) -> str:
    frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
    line = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}: {error}{line}"
