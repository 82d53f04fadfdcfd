"""Reward functions from what a user names: built-in ones, Python functions and HTTP services."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from groupwise.core.errors import UserError
from groupwise.core.io.imports import import_function, refuse_unnamed_code
from groupwise.rewards.call import RewardFunction
from groupwise.rewards.config import SETTING, RewardFunctionsConfig, split_name
from groupwise.rewards.http import HttpReward
from groupwise.rewards.time_limit import with_time_limit


def load_reward_functions(
    config: RewardFunctionsConfig,
    *,
    built_in: Mapping[str, Callable[[], RewardFunction]] | None = None,
    default_name: str = "",
) -> dict[str, RewardFunction]:
    """The functions by the name that their rewards are logged and weighted under, each with its time limit.

    `built_in` makes the functions that a workload brings along. A function without a name gets `default_name`, or else
    its own.
    """
    functions: dict[str, RewardFunction] = {}
    for spec in config.functions:
        name, source = split_name(spec)
        is_service = source.startswith(("http://", "https://"))
        name = name or default_name or ("" if is_service else source.rpartition(":")[2])
        if not name or name in functions:
            problem = f"has two rewards called '{name}'" if name else f"has a service without a name, '{spec}'"
            raise UserError(
                f"{SETTING}.functions {problem}: each reward is logged and weighted by its name. Write name=FUNCTION."
            )
        functions[name] = _service(source, config) if is_service else _function(source, config, built_in or {})
    if not functions:
        raise UserError(
            f"{SETTING}.functions is empty, so there is nothing to learn from: it must be at least one reward,"
            f" {_naming_help(built_in or {})}."
        )
    return functions


def _service(url: str, config: RewardFunctionsConfig) -> HttpReward:
    refuse_unnamed_code(url, f"{SETTING}.functions")
    settings = {name: getattr(config, name) for name in ("timeout_s", "retries", "backoff_s", "rows_per_request")}
    bytes_per_request = int(config.mib_per_request * 2**20)
    return HttpReward(url, **settings, bytes_per_request=bytes_per_request, shared_folder=config.shared_folder)


def _function(
    source: str, config: RewardFunctionsConfig, built_in: Mapping[str, Callable[[], RewardFunction]]
) -> RewardFunction:
    if source in built_in:
        function = built_in[source]()
    elif ":" in source:
        function = import_function(source, f"{SETTING}.functions")
    else:
        raise UserError(f"{SETTING}.functions '{source}' must be {_naming_help(built_in)}.")
    limit = f"it took longer than the {config.timeout_s:g} s of {SETTING}.timeout_s"
    return with_time_limit(function, config.timeout_s, limit)


def _naming_help(built_in: Mapping[str, object]) -> str:
    names = f"one of {', '.join(built_in)}, " if built_in else ""
    return f"{names}name=module:function, name=file.py:function or name=http://host/path"
