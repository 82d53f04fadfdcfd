"""Other libraries' names for our quantities: accepted on the command line, explained once."""

from __future__ import annotations

from collections.abc import Sequence

OTHER_NAMES = {
    "--group-size": ("--k", "--num-generations", "--num-image-per-prompt", "--num-samples"),
    "--conditions-per-step": ("--examples-per-step", "--batch-size", "--m"),
    "--rows-per-pass": ("--device-batch-size", "--train-batch-size", "--micro-batch-size"),
    "--ranks": ("--world-size", "--num-replicas", "--num-gpus"),
}
OTHER_PLACEMENTS = {
    "group_contiguous": "whole",
    "group_distributed": "spread",
    "k_repeat": "shuffled",
}
_OURS = {other: ours for ours, others in OTHER_NAMES.items() for other in others}


def translate(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments in our words, and a remark for each that was in others'."""
    translated: list[str] = []
    remarks = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        ours = _OURS.get(flag.replace("_", "-"), flag)
        if translated[-1:] == ["--placement"]:
            ours = OTHER_PLACEMENTS.get(flag.replace("-", "_"), flag)
        if ours != flag:
            remarks.append(f"{flag} is called {ours} here.")
        translated.append(ours + equals + value)
    return translated, remarks
