"""Find the command, run it, and turn a user's mistake into one paragraph and exit code 2.
Other libraries' names for our quantities: accepted on the command line, explained once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from groupwise import __version__
from groupwise.cli.arguments import ArgumentError, print_json
from groupwise.core.errors import UserError

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


COMMANDS = {
    "train": "train a recipe: progress, live memory, resumable",
    "plan": "bytes by part before launch, settings that fit, what to lower first",
    "check": "preflight alone: is the set-up sound? Trains nothing",
    "place": "show which member of which group runs where",
    "eval": "evaluate the newest checkpoint of a run",
    "report": "one HTML page about a run, or about several side by side",
    "measure": "show where the milliseconds of an answer go, by tier and depth",
    "profile": "learn what an answer will take, before it runs",
}

HELP = f"""\
Groupwise {__version__}: GRPO for anything that makes a row of decisions.

usage: groupwise COMMAND ... [--json]

{chr(10).join(f"  {name:<7} {what}" for name, what in COMMANDS.items())}

  groupwise train examples/doors.py                        train, into runs/doors
  groupwise train examples/doors.py --group-size 16 --help every field, with its meaning
  groupwise train examples/doors.py --resume               go on where it stopped
  torchrun --nproc-per-node 4 -m groupwise train examples/doors.py    (or accelerate launch)
  groupwise report runs/doors                              curves, memory, pictures and rollouts on one page
  groupwise place --conditions 8 --group-size 4 --ranks 8 --rows-per-pass 2 --placement shuffled
  groupwise measure mosaic                                 vision, prefill and decode, in tables and a picture

`groupwise COMMAND --help` explains a command. `--json` prints exactly one JSON object on stdout; all else goes to
stderr. Exit code 0 is success, 2 a mistake that you can mend (the message says how), 130 a run that you stopped.

Names used elsewhere are understood too:
{chr(10).join(f"  {ours:<22} {', '.join(others)}" for ours, others in OTHER_NAMES.items())}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if words[0] == "--version":
        print(f"groupwise {__version__}")
        return 0
    as_json = "--json" in words
    words, remarks = translate([word for word in words if word != "--json"])
    if not words:
        return _fail("There is no command. See `groupwise --help`.", as_json, code=2)
    for remark in remarks:
        print(remark, file=sys.stderr)
    return _run(words, as_json)


def _run(words: Sequence[str], as_json: bool) -> int:
    try:
        return _command(words[0])(list(words[1:]), as_json)
    except ArgumentError as error:
        return _fail(str(error), as_json, code=2)
    except UserError as error:
        print(f"groupwise{_rank()}: {error}", file=sys.stderr)
        return _fail(str(error), as_json, code=2)
    except SystemExit as leaving:  # help was asked for and given
        return leaving.code if isinstance(leaving.code, int) else 0
    except BrokenPipeError:  # the reader of our output, such as `head`, has left
        sys.stdout = None
        return 0
    except KeyboardInterrupt:
        resume = " --resume continues from the newest checkpoint, or from the start if there is none."
        stopped = f"Stopped at once.{resume if words[0] == 'train' else ''}"
        print(f"groupwise{_rank()}: {stopped}", file=sys.stderr)
        return _fail(stopped, as_json, code=130)
    except Exception as error:
        _fail(f"{type(error).__name__}: {error}", as_json, code=1)
        raise


def _command(name: str) -> Callable[[list[str], bool], int]:
    if name not in COMMANDS:
        raise UserError(f"There is no command '{name}'. There are: {', '.join(COMMANDS)}. See `groupwise --help`.")
    command: Callable[[list[str], bool], int] = import_module(f"groupwise.cli.{name}").run
    return command


def _rank() -> str:
    """Which of several processes speaks."""
    return f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""


def _fail(message: str, as_json: bool, *, code: int) -> int:
    if as_json:
        print_json({"error": message})
    return code
