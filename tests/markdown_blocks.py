"""Run the fenced blocks of a Markdown page: `sh` and `python`, top to bottom, in one scratch folder.

A comment directly above a block shrinks it for the test:

    <!-- test: --steps 2 --run.preflight False -->         appended to every `groupwise` command that trains
    <!-- test: 8 ranks = 2 ranks; big-model = @llama -->   replaced in the block; @name is a fixture, made on first use
    <!-- test: exits 2 -->                                  the exit code that every command of the block must have
    <!-- test: fragment -->                                 Python that stands for a part of a file: only compiled

A block without a comment runs as it stands. Output is shown in blocks without a language and is not run.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

from processes import ENVIRONMENT

from groupwise.cli.main import main

ROOT = Path(__file__).parent.parent

RUN_LANGUAGES = ("sh", "python")
_BLOCK = re.compile(r"((?:^<!-- test: .*? -->\n)*)^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_INDENTED_COMMAND = re.compile(r"^ {4,}(?:groupwise|torchrun|accelerate|python|make|pip) ", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    flags: str = ""
    replacements: Mapping[str, str] = field(default_factory=dict)
    exit_code: int = 0
    is_fragment: bool = False

    @property
    def where(self) -> str:
        return f"{self.page}, line {self.line}"

    @property
    def commands(self) -> list[str]:
        """One per line; a backslash continues a line, comments and blank lines are left out."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def read_blocks(page: Path) -> list[Block]:
    """The blocks of a page that run; refuses commands that hide in indented blocks, where nothing would run them."""
    text = page.read_text()
    outside = _BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
    hidden = _INDENTED_COMMAND.search(outside)
    assert not hidden, f"{page.name}: '{hidden[0].strip()}' stands in an indented block: use a fenced `sh` block"
    blocks = []
    for match in _BLOCK.finditer(text):
        markers, indent, language, body = match.groups()
        if language in RUN_LANGUAGES:
            line = text[: match.start()].count("\n") + markers.count("\n") + 1
            body = textwrap.dedent(body) if indent else body
            blocks.append(_with_markers(Block(page.name, line, language, body), markers))
    return blocks


def _with_markers(block: Block, markers: str) -> Block:
    flags, replacements, exit_code, is_fragment = "", {}, 0, False
    for marker in re.findall(r"<!-- test: (.*?) -->", markers):
        if marker == "fragment":
            is_fragment = True
        elif marker.startswith("exits "):
            exit_code = int(marker.removeprefix("exits "))
        elif marker.startswith("--"):
            flags = marker
        else:
            for replacement in marker.split("; "):
                old, new = replacement.split(" = ")
                assert old in block.text, f"{block.where}: '{old}' is not in the block, so it cannot be replaced"
                replacements[old] = new
    return Block(block.page, block.line, block.language, block.text, flags, replacements, exit_code, is_fragment)


class PageRunner:
    """Runs the blocks of one page in `folder`; Python blocks share their names."""

    def __init__(self, folder: Path, fixtures: Mapping[str, Callable[[Path], object]], *, seconds: float = 120):
        self.folder, self._fixtures, self._seconds = folder, fixtures, seconds
        self._names: dict[str, object] = {"__name__": "docs"}

    def run(self, block: Block) -> None:
        if block.language == "python":
            self._run_python(block)
        else:
            for command in block.commands:
                self._run_command(block, command)

    def _run_python(self, block: Block) -> None:
        source = textwrap.dedent(self._shrunken(block, block.text))
        tree = ast.parse(source, f"{block.page}:{block.line}")
        if not block.is_fragment:
            with contextlib.chdir(self.folder):
                exec(compile(tree, f"{block.page}:{block.line}", "exec"), self._names)

    def _run_command(self, block: Block, command: str) -> None:
        arguments = shlex.split(self._shrunken(block, command), comments=True)
        if "train" in arguments:
            arguments += shlex.split(block.flags)
        code, output = self._run_groupwise(arguments) if arguments[0] == "groupwise" else self._run_program(arguments)
        assert code == block.exit_code, (
            f"{block.where}: `{command}` ran as `{shlex.join(arguments)}`\n{output[-4000:]}\nexit code {code}"
        )

    def _run_groupwise(self, arguments: list[str]) -> tuple[int, str]:
        """In this process, which saves the imports."""
        output = io.StringIO()
        with contextlib.chdir(self.folder), redirect_stdout(output), redirect_stderr(output):
            return main(arguments[1:]), output.getvalue()

    def _run_program(self, arguments: list[str]) -> tuple[int, str]:
        program, *rest = arguments
        launchers = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}
        if program == "python":
            command = [sys.executable, *rest]
        elif program in launchers:
            command = [sys.executable, "-m", launchers[program], *rest]
        elif program == "make":
            command = ["make", "-C", str(ROOT), "--dry-run", *rest]
        elif program in (".", "pip"):  # what `make setup` does
            return 0, ""
        else:
            raise AssertionError(f"no test knows how to run `{program}`")
        ended = subprocess.run(
            command,
            cwd=self.folder,
            env={**ENVIRONMENT, "PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}{os.pathsep}{ROOT}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=self._seconds,
            check=False,
        )
        return ended.returncode, ended.stdout

    def _shrunken(self, block: Block, text: str) -> str:
        for old, new in block.replacements.items():
            text = text.replace(old, re.sub(r"@(\w+)", lambda match: str(self._fixture(match[1])), new))
        return text

    def _fixture(self, name: str) -> Path:
        path = self.folder / "fixtures" / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            self._fixtures[name](path)
        return path
