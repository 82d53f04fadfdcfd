"""Rows of a dataset in every format; a bad row is named by its line, and refused or skipped and counted."""

import os
import shutil
from contextlib import suppress

import datasets
import pytest

from groupwise.core.errors import UserError
from groupwise.data.rows import BadRow, RowFilter, format_counts, read_rows, require_columns

GOOD = [{"prompt": "one?", "answer": "1"}, {"prompt": "two?", "answer": "2"}]
LINES = ['{"prompt": "one?", "answer": "1"}', '{"prompt": "two?", "answer": "2"}']


def refuse():
    return RowFilter("refuse", "--workload.on-bad-row")


def skip():
    return RowFilter("skip", "--workload.on-bad-row")


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "x", "answer": ', r"rows.jsonl, line 3: it is not JSON \(Expecting value.*one whole object"),
        ("[1, 2]", "line 3: it holds list, and every row must be an object"),
    ],
)
def test_a_broken_line_is_named_or_skipped_and_counted(tmp_path, line, says):
    file = write(tmp_path / "rows.jsonl", [*LINES, line, LINES[0]])
    with pytest.raises(UserError, match=says + r".*set --workload.on-bad-row to 'skip'"):
        read_rows(file, refuse())
    row_filter = skip()
    assert read_rows(file, row_filter).rows == (*GOOD, GOOD[0])
    assert row_filter.skipped == {"broken line": 1}
    assert len(row_filter.messages) == 1
    assert row_filter.messages[0].startswith(f"{file}, line 3: ")


def test_bytes_that_are_no_text_and_files_that_are_not_there(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(UserError, match=r"line 1: byte 13 is not UTF-8"):
        read_rows(str(tmp_path / "rows.jsonl"), refuse())
    with pytest.raises(UserError, match=r"^data.train is '.*none.jsonl', which is not there. Name a .jsonl file"):
        read_rows(str(tmp_path / "none.jsonl"), refuse(), setting="data.train")
    with pytest.raises(UserError, match=r"no usable row \(2 broken line\)"):
        read_rows(write(tmp_path / "bad.jsonl", ["{", "["]), skip())
    with pytest.raises(UserError, match=r"bad.jsonl holds no usable row. Give at least one"):
        read_rows(write(tmp_path / "bad.jsonl", [""]), refuse())


def test_blank_lines_are_no_rows_and_line_numbers_count_them(tmp_path):
    file = write(tmp_path / "rows.jsonl", [LINES[0], "", LINES[1]])
    records = read_rows(file, refuse())
    assert records.numbers == (1, 3)
    assert records.sources == (f"{file}, line 1", f"{file}, line 3")


def test_a_folder_that_datasets_saved(tmp_path):
    saved = datasets.Dataset.from_list(GOOD)
    saved.save_to_disk(tmp_path / "one")
    records = read_rows(str(tmp_path / "one"), refuse())
    assert records.rows == tuple(GOOD)
    assert records.sources[1] == f"{tmp_path}/one, row 2"
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(tmp_path / "both")
    with pytest.raises(UserError, match=r"holds 2 splits, train, test: name one of them, as .*both/train"):
        read_rows(str(tmp_path / "both"), refuse())
    assert len(read_rows(str(tmp_path / "both" / "test"), refuse()).rows) == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"is not a folder that `datasets` wrote"):
        read_rows(str(tmp_path / "empty"), refuse())


def test_parquet(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    rows = [{"prompt": messages, "answer": "1"}, {"prompt": messages, "answer": None}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    records = read_rows(str(tmp_path / "rows.parquet"), refuse())
    assert records.rows == tuple(rows)
    assert records.sources[0] == f"{tmp_path}/rows.parquet, row 1"
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"broken.parquet is not a parquet file"):
        read_rows(str(tmp_path / "broken.parquet"), refuse())


def test_rows_from_a_function(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "make_rows.py").write_text(
        f"def good():\n    return {GOOD!r}\n"
        f"def one_by_one():\n    yield from {GOOD!r}\n"
        "def mixed():\n    return [{'a': 1}, 3]\n"
        "def number():\n    return 3\n"
        "def raises():\n    yield {'a': 1}\n    1 / 0\n"
    )
    for name in ("make_rows:good", "make_rows.py:one_by_one"):
        assert read_rows(name, refuse()).rows == tuple(GOOD)
    with pytest.raises(UserError, match=r"make_rows:mixed, row 2: it holds int"):
        read_rows("make_rows:mixed", refuse())
    with pytest.raises(UserError, match=r"data.train 'make_rows:number' returned int: it must return the rows"):
        read_rows("make_rows:number", refuse(), setting="data.train")
    with pytest.raises(UserError, match=r"raised ZeroDivisionError: division by zero \(.*make_rows.py:11\)"):
        read_rows("make_rows:raises", refuse())
    with pytest.raises(UserError, match=r"data.train 'make_rows:none' cannot be imported"):
        read_rows("make_rows:none", refuse(), setting="data.train")


def test_required_columns():
    require_columns({"a": 0, "b": ""}, ["a", "b"])
    with pytest.raises(BadRow, match=r"it has no column 'c'; it has 'a'. Add it"):
        require_columns({"a": 0}, ["a", "c"], "Add it.")
    with pytest.raises(BadRow, match=r"it has no column 'a'; it has 'a'."):
        require_columns({"a": None}, ["a"])


def test_counts_are_readable_and_the_policy_is_one_of_two():
    row_filter = skip()
    for reason in ("broken line", "empty prompt", "broken line"):
        row_filter.reject("x, line 1", BadRow(reason, "it is bad."))
    assert format_counts(row_filter.skipped) == "2 broken line, 1 empty prompt"
    with pytest.raises(UserError, match=r"--workload.on-bad-row is drop: it must be 'refuse' or 'skip'"):
        RowFilter("drop", "--workload.on-bad-row")


def test_what_may_never_end_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for endless in ("/dev/zero", tmp_path / "pipe.jsonl"):
        with pytest.raises(UserError, match="a pipe or a device"):
            read_rows(str(endless), RowFilter("refuse", "on_bad_row"))
    (tmp_path / "zeros.jsonl").touch()
    os.truncate(tmp_path / "zeros.jsonl", 3 << 30)  # one line of 3 GiB that takes no disk
    with pytest.raises(UserError, match=r"line 1 has more than 64.0 MiB"):
        read_rows(str(tmp_path / "zeros.jsonl"), RowFilter("skip", "on_bad_row"))


@pytest.mark.timeout(60)
def test_a_small_parquet_file_of_endless_text_is_refused(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    text = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), pa.array(["x" * 2**20]))
    parquet.write_table(pa.table({"prompt": text}), tmp_path / "bomb.parquet")
    with pytest.raises(UserError, match="100 times its size"):
        read_rows(str(tmp_path / "bomb.parquet"), refuse())


@pytest.mark.timeout(60)
def test_a_folder_of_datasets_is_looked_at_before_it_is_opened(tmp_path):
    datasets.Dataset.from_list([{"a": 1}]).save_to_disk(str(tmp_path / "saved"))
    table = next((tmp_path / "saved").glob("*.arrow"))
    for offset in range(0, 400, 7):
        content = bytearray(table.read_bytes())
        content[offset] ^= 0xFF
        (tmp_path / "saved" / "flipped").write_bytes(content)
        shutil.copytree(tmp_path / "saved", tmp_path / "damaged")
        (tmp_path / "damaged" / "flipped").rename(tmp_path / "damaged" / table.name)
        with suppress(UserError):
            read_rows(str(tmp_path / "damaged"), refuse())
        shutil.rmtree(tmp_path / "damaged")
    table.unlink()
    os.mkfifo(table)
    with pytest.raises(UserError, match="not a regular file"):
        read_rows(str(tmp_path / "saved"), refuse())
