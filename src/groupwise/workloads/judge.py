"""Call reward functions of TRL's signature, sync or async. A failed one leaves its rewards missing, with the reason."""

from __future__ import annotations

import asyncio
import inspect
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.types import Terms

RewardFunction = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]
"""`def reward(prompts, completions, **columns) -> list[float]`: one number a row, None (or NaN) for "no reward"."""


def judge(
    functions: Mapping[str, RewardFunction], prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
) -> Terms:
    """All functions on all rows; the async ones run together."""

    async def call_all() -> list[tuple[Tensor, str | None]]:
        calls = (_call(name, function, prompts, completions, columns) for name, function in functions.items())
        return await asyncio.gather(*calls)

    results = dict(zip(functions, asyncio.run(call_all()), strict=True))
    return Terms(
        {name: values for name, (values, _) in results.items()},
        {name: reason for name, (_, reason) in results.items() if reason},
    )


async def _call(
    name: str, function: RewardFunction, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]
) -> tuple[Tensor, str | None]:
    """One function's rewards, and why some are missing. Only what the function raises itself is taken as a failure."""
    rows = len(completions)
    try:
        answer = function(prompts=prompts, completions=completions, **columns)
        if inspect.isawaitable(answer):
            answer = await answer
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything; the policy for it is in the config
        return torch.full((rows,), torch.nan, dtype=torch.float64), _reason(error)
    return _as_rewards(name, answer, rows)


def _as_rewards(name: str, answer: Any, rows: int) -> tuple[Tensor, str | None]:
    if isinstance(answer, Tensor):
        answer = answer.tolist() if answer.ndim == 1 else answer
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
