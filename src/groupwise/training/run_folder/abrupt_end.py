"""Why the last run in a folder ended without a word: the next one says it, because nobody can report a kill -9."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupwise.core.io.json_types import is_number
from groupwise.core.units import format_bytes

NEARLY_FULL = 0.8
"""Share of the memory from which on a kill was probably the system's own."""


def oom_kills() -> int:
    """Processes that the kernel has ended since boot because memory ran out; 0 where it does not count them."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def explain_abrupt_end(owner: Mapping[str, Any], last_step: Mapping[str, Any]) -> str | None:
    """A sentence about the process that held the folder before; None where there was none, or it ended in order.

    `last_step` is the last line of its metrics.jsonl.
    """
    if not isinstance(owner.get("process"), int) or owner.get("ended") is not False:
        return None
    step = last_step.get("step")
    when = f"after step {step}" if isinstance(step, int) else "in its first step"
    text = (
        f"The last run here (process {owner['process']} on {owner.get('host')}) ended without a word {when}: it was"
        " killed (kill -9), or the machine failed."
    )
    evidence = _killed_since(owner) or _nearly_full(last_step.get("memory_bytes"))
    if not evidence:
        return text
    remedy = "Smaller --rows-per-pass takes less memory and gives the same result; `groupwise plan` says how much."
    return f"{text} {evidence}, so the system's out-of-memory killer is the likely reason. {remedy}"


def _killed_since(owner: Mapping[str, Any]) -> str:
    then, now = owner.get("oom_kills"), oom_kills()
    if owner.get("host") != socket.gethostname() or not isinstance(then, int) or now <= then:
        return ""
    processes = "a process" if now - then == 1 else f"{now - then} processes"
    return f"The kernel has ended {processes} on this machine since then because memory ran out"


def _nearly_full(memory: object) -> str:
    """Of host memory, which `device` is where the run had no accelerator."""
    if not isinstance(memory, dict) or not all(is_number(memory.get(name)) for name in ("host", "device")):
        return ""
    host, device = memory["host"], memory["device"]
    if not 0 < NEARLY_FULL * device <= host <= 2 * device:
        return ""
    return f"Its last step took {format_bytes(int(host))} of {format_bytes(int(device))} (measured)"
