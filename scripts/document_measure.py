"""Run the command that docs/measure.md shows, and put what comes back into the page, tables and picture alike.

python scripts/document_measure.py
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "measure.md"
SHOWN = re.compile(r"^    (groupwise measure .*)\n\n```\n.*?^```\n", flags=re.MULTILINE | re.DOTALL)


def main() -> None:
    page = PAGE.read_text()
    found = SHOWN.search(page)
    assert found is not None, f"{PAGE} shows no command with its output"
    words = [sys.executable, "-m", *shlex.split(found[1])]
    printed = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    tidy = "\n".join(line.rstrip() for line in printed.splitlines())
    tidy = re.sub(r"\n{3,}", "\n\n", tidy).strip()
    PAGE.write_text(page[: found.start()] + f"    {found[1]}\n\n```\n{tidy}\n```\n" + page[found.end() :])


if __name__ == "__main__":
    main()
