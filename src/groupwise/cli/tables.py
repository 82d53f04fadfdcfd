"""Tables on the terminal, the same for all commands."""

from __future__ import annotations

from groupwise.workloads.base import ReportTable


def print_table(table: ReportTable) -> None:
    """Title, table and note on stdout."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, name in enumerate(table.columns):
        drawn.add_column(name, justify="right" if index else "left")
    for row in table.rows:
        if row:
            drawn.add_row(*map(Text, row))
        else:
            drawn.add_section()
    console = Console(highlight=False)
    console.print()
    console.print(Text(table.title, style="bold"))
    console.print(drawn, end="")
    if table.note:
        console.print(Text(table.note))
