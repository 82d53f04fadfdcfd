"""Call reward functions of TRL's signature, sync or async. A failed one leaves its rewards missing, with the reason."""

from __future__ import annotations

import asyncio
import inspect
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from groupwise.core.errors import UserError, is_out_of_memory
from groupwise.core.types import RewardTerms

RewardFunction = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]
"""`def reward(prompts, completions, **columns) -> list[float]`: one number a row, None (or NaN) for "no reward"."""


def call_rewards(
    functions: Mapping[str, RewardFunction], prompts: Sequence[Any], completions: Sequence[Any], /, **columns: Any
) -> RewardTerms:
    """All functions on all rows; the async ones run together."""
    given = {"prompts": prompts, "completions": completions, **columns}
    answers = {name: _call(partial(function, **given)) for name, function in functions.items()}
    waiting = {name: answer for name, answer in answers.items() if inspect.isawaitable(answer)}
    answers |= _await_all(waiting)
    results = {name: _as_rewards(name, answer, len(completions)) for name, answer in answers.items()}
    return RewardTerms(
        {name: values for name, (values, _) in results.items()},
        {name: reason for name, (_, reason) in results.items() if reason},
    )


@dataclass(frozen=True)
class _FailedReward:
    """Takes the place of an answer: only what a function raises itself is taken as a failure."""

    reason: str


def _call(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # a user's function may raise anything; the policy for it is in the config
        if is_out_of_memory(error):  # not the reward's fault: it is asked again in smaller pieces
            raise
        return _FailedReward(_reason(error))


def _await_all(waiting: Mapping[str, Awaitable[Any]]) -> dict[str, Any]:
    async def settle(answer: Awaitable[Any]) -> Any:
        try:
            return await answer
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return _FailedReward(_reason(error))

    async def settle_all() -> list[Any]:
        return await asyncio.gather(*map(settle, waiting.values()))

    if not waiting:
        return {}
    with ThreadPoolExecutor(1) as aside:  # a notebook's own event loop may be running in this thread
        return dict(zip(waiting, aside.submit(lambda: asyncio.run(settle_all())).result(), strict=True))


def _as_rewards(name: str, answer: Any, rows: int) -> tuple[Tensor, str | None]:
    if isinstance(answer, _FailedReward):
        return torch.full((rows,), torch.nan, dtype=torch.float64), answer.reason
    if hasattr(answer, "tolist") and getattr(answer, "ndim", 0) == 1:  # a tensor or an array
        answer = answer.tolist()
    if isinstance(answer, str | bytes) or not isinstance(answer, Sequence):
        raise UserError(
            f"Reward '{name}' returned {type(answer).__name__}: it must return a list with one number for each of its"
            f" {rows} rows."
        )
    if len(answer) != rows:
        raise UserError(
            f"Reward '{name}' returned {len(answer)} values for {rows} rows: it must return exactly one number a row,"
            " in their order (None where there is no reward)."
        )
    values = torch.tensor([_number(name, row, value) for row, value in enumerate(answer)], dtype=torch.float64)
    missing = ~values.isfinite()
    if not missing.any():
        return values, None
    odd = [answer[row] for row in missing.nonzero().flatten().tolist()]
    reason = f"returned {odd[0]} for {len(odd)} of {rows} rows"
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
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}: {error}{place}"
