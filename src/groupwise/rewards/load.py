"""Rewards by name and place: `name=module:function` in process, `name=http://...` as a service."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from groupwise.core.errors import UserError
from groupwise.rewards.call import RewardFunction
from groupwise.rewards.http import HttpReward


def named_rewards(places: Sequence[str], service: HttpReward) -> dict[str, RewardFunction]:
    """The functions behind `name=place`; services are called with the settings of the given one."""
    found: dict[str, RewardFunction] = {}
    for entry in places:
        name, _, place = entry.partition("=")
        if not name or not place or name in found:
            raise UserError(
                f"workload.rewards holds '{entry}': each must be name=module:function or name=http://host/path, every"
                " name once."
            )
        is_service = place.startswith(("http://", "https://"))
        found[name] = replace(service, url=place) if is_service else _own(entry, place)
    if not found:
        raise UserError(
            "workload.rewards is empty, so there is nothing to learn from. Give name=module:function or"
            " name=http://host/path, once or more."
        )
    return found


def _own(entry: str, place: str) -> RewardFunction:
    module, _, function = place.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        reward: RewardFunction = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"workload.rewards holds '{entry}', which cannot be imported ({error}). Check the spelling, and that the"
            " module is on PYTHONPATH."
        ) from error
    return reward
