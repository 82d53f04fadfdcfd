"""The commands, other libraries' names for our flags, and exit codes."""

from __future__ import annotations

import io
import itertools
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TextIO

from groupwise import __version__
from groupwise.cli.arguments import ArgumentError, print_json
from groupwise.core.errors import DISK_FAULTS, UserError, is_out_of_memory, path_error_message, printable
from groupwise.core.io.process_end import heard_at_the_end

COMMANDS = {
    "train": "train a recipe, with live progress and memory; can be resumed",
    "plan": "estimate memory before launch: bytes by part, settings that fit, what to reduce first",
    "check": "run the preflight checks of a recipe, without training",
    "place": "show which member of which group runs on which rank",
    "eval": "evaluate the newest checkpoint of a run on held-out data",
    "export": "write what a run trained as a folder that transformers or diffusers load",
    "report": "write one HTML page about a run, or about several side by side",
    "measure": "measure the latency of one answer by stage, tier and depth",
    "profile": "measure a model and fit the latency estimator that controllers use",
}

ALIASES = {
    "--group-size": ("--k", "--num-generations", "--num-image-per-prompt", "--num-samples"),
    "--conditions-per-step": ("--examples-per-step", "--batch-size", "--m"),
    "--rows-per-pass": ("--device-batch-size", "--train-batch-size", "--micro-batch-size"),
    "--ranks": ("--world-size", "--num-replicas", "--num-gpus"),
}
"""Our flags, and what other libraries call them."""
PLACEMENT_ALIASES = {
    "group_contiguous": "whole",
    "group_distributed": "spread",
    "k_repeat": "shuffled",
}
_FLAG_OF_ALIAS = {alias: flag for flag, aliases in ALIASES.items() for alias in aliases}

_OUT_OF_MEMORY_ADVICE = (
    "Take a smaller model, adapter or length, a machine with more memory, or several with --shard full. `groupwise plan"
    " RECIPE` says how much it needs."
)

HELP = f"""\
Groupwise {__version__}: GRPO for anything that makes a sequence of decisions.

usage: groupwise COMMAND ... [--json]

{chr(10).join(f"  {name:<7} {summary}" for name, summary in COMMANDS.items())}

Examples:
  groupwise train chat                                     train a built-in recipe, into runs/chat
  groupwise train examples/doors.py --group-size 16        train a recipe of your own, with another group size
  groupwise train examples/doors.py --resume               continue from the newest checkpoint
  groupwise train chat --help                              every field of a recipe, with its meaning and default
  torchrun --nproc-per-node 4 -m groupwise train chat      train on 4 ranks (accelerate launch works too)
  groupwise plan chat --device-memory 32GiB                will it fit?
  groupwise eval runs/chat                                 evaluate what was trained
  groupwise report runs/chat                               curves, memory, images and rollouts on one page
  groupwise measure mosaic                                 latency of the embedded vision-language model

`groupwise COMMAND --help` explains a command. `--json` prints exactly one JSON object on stdout; all else goes to
stderr. Exit code 0 is success, 2 an error that you can fix (the message says how), 3 a run that has lost one of its
ranks or is stuck, 130 a run that you stopped, 1 a bug.

Other libraries' names are accepted too:
{chr(10).join(f"  {flag:<22} {', '.join(aliases)}" for flag, aliases in ALIASES.items())}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    if sys.stdout is None or sys.stderr is None:  # closed by the shell
        sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    try:
        code = _main(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()  # now, because after this nobody explains an error
        return code
    except BrokenPipeError:  # the reader of our output, such as `head`, has closed it
        _drop_output()
        return 0
    except OSError as error:
        if error.filename is not None or error.errno not in DISK_FAULTS:
            raise
        _drop_output()
        with suppress(OSError):
            sys.stderr.write(f"groupwise: What is printed cannot be written: {error.strerror}.\n")
            sys.stderr.flush()
        return 2


def _drop_output() -> None:
    """What is still to be printed goes nowhere, or Python would try it once more as it ends."""
    with suppress(OSError):  # io.UnsupportedOperation is one
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _main(arguments: list[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be Unicode
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if arguments[0] == "--version":
        print(f"groupwise {__version__}")
        return 0
    if any("\0" in argument for argument in arguments):
        return _refuse("An argument contains a NUL character, which no path or name has.", "--json" in arguments)
    if _has_empty_path(arguments):
        message = (
            "A path is empty, such as that of a shell variable which is not set. The folder you are in is called '.'."
        )
        return _refuse(message, "--json" in arguments)
    as_json = "--json" in arguments
    arguments, remarks = translate_aliases([argument for argument in arguments if argument != "--json"])
    if not arguments:
        return _fail("There is no command. See `groupwise --help`.", as_json, code=2)
    for remark in remarks:
        print(remark, file=sys.stderr)
    return _run(arguments[0], arguments[1:], as_json)


def _has_empty_path(arguments: Sequence[str]) -> bool:
    """Whether a run would be read from or written to the current folder, where nobody has named it."""
    named = {"--run-dir", "--run_dir", "--out"}
    positional = arguments[0] in ("eval", "export", "report") and "" in arguments[1:]
    flags = any(flag in named and value == "" for flag, value in itertools.pairwise(arguments))
    return positional or flags or any(f"{flag}=" in arguments for flag in named)


def translate_aliases(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments with our names, and a remark for each alias."""
    translated: list[str] = []
    remarks = []
    for argument in arguments:
        given, equals, value = argument.partition("=")
        name = _FLAG_OF_ALIAS.get(given.replace("_", "-"), given)
        if translated[-1:] == ["--placement"]:
            name = PLACEMENT_ALIASES.get(given.replace("-", "_"), given)
        if name != given:
            remarks.append(f"{given} is called {name} here.")
        translated.append(name + equals + value)
    return translated, remarks


def _run(command: str, arguments: list[str], as_json: bool) -> int:
    stdout = sys.stdout  # commands redirect it meanwhile
    try:
        with heard_at_the_end(lambda message: _fail(message, as_json, code=0, stream=stdout)):
            return _load_command(command)(arguments, as_json)
    except ArgumentError as error:
        return _fail(str(error), as_json, code=2)
    except SystemExit as leaving:  # after --help
        if isinstance(leaving.__context__, BrokenPipeError):  # rich leaves then
            return 0
        return leaving.code if isinstance(leaving.code, int) else 0
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        resume = " --resume continues from the newest checkpoint, or from the start if there is none."
        message = f"Interrupted.{resume if command == 'train' else ''}"
        print(f"groupwise{_rank_label()}: {message}", file=sys.stderr)
        return _fail(message, as_json, code=130)
    except Exception as error:
        remedy = _message_for_user(error)
        if remedy is not None:
            return _refuse(remedy, as_json, code=error.exit_code if isinstance(error, UserError) else 2)
        _fail(f"{type(error).__name__}: {error}", as_json, code=1)
        raise


def _message_for_user(error: Exception) -> str | None:
    """What the user can do about an error; None for a bug, whose traceback is shown."""
    if isinstance(error, UserError):
        return str(error)
    if is_out_of_memory(error):
        return f"Memory ran out ({next(iter(str(error).splitlines()), type(error).__name__)}). {_OUT_OF_MEMORY_ADVICE}"
    return path_error_message(error)


def _refuse(message: str, as_json: bool, *, code: int = 2) -> int:
    message = printable(re.sub(r"\S{300,}", _shorten, message))
    print(f"groupwise{_rank_label()}: {message}", file=sys.stderr)
    return _fail(message, as_json, code=code)


def _shorten(word: re.Match[str]) -> str:
    return f"{word[0][:100]}... ({len(word[0]):,} characters)"


def _load_command(name: str) -> Callable[[list[str], bool], int]:
    if name not in COMMANDS:
        raise UserError(f"There is no command '{name}'. There are: {', '.join(COMMANDS)}. See `groupwise --help`.")
    command: Callable[[list[str], bool], int] = import_module(f"groupwise.cli.{name}").run
    return command


def _rank_label() -> str:
    """Which of several processes prints a message."""
    return f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""


def _fail(message: str, as_json: bool, *, code: int, stream: TextIO | None = None) -> int:
    if as_json:
        print_json({"error": message}, stream)
    return code
