"""Find the command, run it, and turn a user's mistake into one paragraph and exit code 2."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from groupwise import __version__
from groupwise.cli.words import OTHER_NAMES, translate
from groupwise.core.errors import UserError

COMMANDS = {
    "train": "train a recipe: progress, live memory, resumable",
    "check": "preflight alone: is the set-up sound? Trains nothing",
    "place": "show which member of which group runs where",
    "eval": "evaluate the newest checkpoint of a run",
}

HELP = f"""\
Groupwise {__version__}: GRPO for anything that makes a row of decisions.

usage: groupwise COMMAND ... [--json]

{chr(10).join(f"  {name:<7} {what}" for name, what in COMMANDS.items())}

  groupwise train examples/doors.py                        train, into runs/doors
  groupwise train examples/doors.py --group-size 16 --help every field, with its meaning
  groupwise train examples/doors.py --resume               go on where it stopped
  accelerate launch --num-processes 4 -m groupwise train examples/doors.py
  groupwise place --conditions 8 --group-size 4 --ranks 8 --rows-per-pass 2 --placement shuffled

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
    for remark in remarks:
        print(remark, file=sys.stderr)
    return _run(words, as_json)


def _run(words: Sequence[str], as_json: bool) -> int:
    try:
        return _command(words[0])(list(words[1:]), as_json)
    except UserError as error:
        print(f"groupwise{_rank()}: {error}", file=sys.stderr)
        _print_error(str(error), as_json)
        return 2
    except SystemExit as leaving:  # tyro has said what is wrong with the arguments
        code = leaving.code if isinstance(leaving.code, int) else 2
        if code:
            _print_error("The arguments cannot be used; the reason is on stderr.", as_json)
        return code
    except BrokenPipeError:  # the reader of our output, such as `head`, has left
        sys.stdout = None
        return 0
    except KeyboardInterrupt:
        print("groupwise: stopped; the last checkpoint stands. Continue with --resume.", file=sys.stderr)
        return 130


def _command(name: str) -> Callable[[list[str], bool], int]:
    if name not in COMMANDS:
        raise UserError(f"There is no command '{name}'. There are: {', '.join(COMMANDS)}. See `groupwise --help`.")
    command: Callable[[list[str], bool], int] = import_module(f"groupwise.cli.{name}").run
    return command


def _rank() -> str:
    """Which of several processes speaks."""
    return f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""


def _print_error(message: str, as_json: bool) -> None:
    if as_json:
        print_json({"error": message})


def print_json(content: dict[str, Any]) -> None:
    print(json.dumps(content))
