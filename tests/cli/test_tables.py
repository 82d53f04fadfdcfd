from groupwise.cli.tables import print_table
from groupwise.workloads.base import ReportTable


def test_a_table_has_title_columns_sections_and_note_and_its_cells_are_plain_text(capsys):
    print_table(ReportTable("Peaks", ["part", "bytes"], [["[/b] cache", "12"], [], ["total", "7"]], "Of one rank."))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line.split() for line in lines if line and not line.startswith("─")] == [
        ["Peaks"],
        ["part", "bytes"],
        ["[/b]", "cache", "12"],
        ["total", "7"],
        ["Of", "one", "rank."],
    ]
    cache, total = (next(n for n, line in enumerate(lines) if line.startswith(name)) for name in ("[/b]", "total"))
    assert total == cache + 2  # a separator between the sections
