"""Every form of data reads to the same rows, and every mistake in a file is named with file and line (D01)."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainwright.errors import ExitCode, UserError
from trainwright.train.data.problems import Problems
from trainwright.train.data.rows import LONGEST_LINE_BYTES, column_names, read_rows
from trainwright.train.data.sources import find_source

ROWS = [{"prompt": f"prompt {i}, with a comma", "response": f'line "one"\nline two of {i} é'} for i in range(30)]


def _read(path: Path | str, split: str = "train", limit: int | None = None) -> list[tuple[str, dict[str, object]]]:
    source = find_source(str(path), split)
    problems = Problems(source.name)
    rows = list(read_rows(source, problems, limit=limit))
    problems.raise_if_any()
    return rows


def _problems(path: Path) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        _read(path)
    assert caught.value.exit_code == ExitCode.USAGE
    return caught.value.problems


def _jsonl(path: Path) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS), encoding="utf-8")
    return path


def _csv(path: Path) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["prompt", "response"])
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def _json_object(path: Path) -> Path:
    path.write_text(json.dumps({"version": 1, "data": ROWS}, indent=1), encoding="utf-8")
    return path


def _json_array(path: Path) -> Path:
    path.write_text(json.dumps(ROWS), encoding="utf-8")
    return path


def _parquet(path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=7)
    return path


def _datasets_folder(path: Path) -> Path:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(path), num_shards=3)
    return path


def _datasets_splits(path: Path) -> Path:
    import datasets

    split = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    )
    split.save_to_disk(str(path))
    return path


def _shards(path: Path) -> Path:
    path.mkdir()
    for shard in range(2):
        rows = ROWS[shard * 15 : shard * 15 + 15]
        pq.write_table(pa.Table.from_pylist(rows), path / f"train-{shard:05}-of-00002.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS[:3]), path / "test-00000-of-00001.parquet")
    return path


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("rows.jsonl", _jsonl),
        ("lines.json", _jsonl),
        ("array.json", _json_array),
        ("object.json", _json_object),
        ("rows.csv", _csv),
        ("rows.parquet", _parquet),
        ("saved", _datasets_folder),
        ("splits", _datasets_splits),
        ("shards", _shards),
    ],
)
def test_every_form_gives_the_same_rows(name: str, make: Callable[[Path], Path], tmp_path: Path) -> None:
    path = make(tmp_path / name)
    assert [row for _, row in _read(path)] == ROWS
    assert [row for _, row in _read(path, limit=4)] == ROWS[:4]
    assert column_names(find_source(str(path), "train")) == ["prompt", "response"]


def test_locations_lead_to_the_row(tmp_path: Path) -> None:
    jsonl, table = _jsonl(tmp_path / "rows.jsonl"), _csv(tmp_path / "rows.csv")
    assert _read(jsonl)[11][0] == f"{jsonl}:12"
    # A CSV record of two lines: the header is line 1, and each record before takes two.
    assert _read(table)[11][0] == f"{table}:24"
    assert "prompt 11" in table.read_text().splitlines()[23]


def test_blank_lines_and_a_byte_order_mark_are_no_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n  \n{"text": "b"}\n\n')
    assert [(where[-2:], row) for where, row in _read(path)] == [(":1", {"text": "a"}), (":4", {"text": "b"})]


GOOD = b'{"prompt": "a", "response": "b"}\n'
BAD_LINES = {
    "cut short": (b'{"prompt": "a", "resp', "no valid JSON"),
    "not an object": (b'["a", "b"]', "expected an object, found an array"),
    "bad UTF-8": (b'{"prompt": "\xff", "response": "b"}', "0xff at column 13 is no UTF-8"),
    "NUL": (b'{"prompt": "a\x00", "response": "b"}', "NUL byte"),
    "10 MB line": (b'{"prompt": "' + b"a" * 10_000_000 + b'", "response": "b"}', "longer than 8 MiB"),
    "nested too deeply": (b'{"prompt": ' + b"[" * 100_000, "nested too deeply"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_of_json_lines_is_named(case: str, tmp_path: Path) -> None:
    line, why = BAD_LINES[case]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD * 2 + line + b"\n" + GOOD)
    (problem,) = _problems(path)
    assert problem.startswith(f"{path}:3: ") and why in problem


def test_a_line_at_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    frame = len(b'{"text": ""}\n')
    path.write_bytes(b'{"text": "' + b"a" * (LONGEST_LINE_BYTES - frame) + b'"}\n' + b'{"text": "b"}')
    assert [len(str(row["text"])) for _, row in _read(path)] == [LONGEST_LINE_BYTES - frame, 1]


BAD_CSV = {
    "too few fields": (b"only one\n", "1 fields where the header has 2"),
    "too many fields": (b"a,b,c\n", "3 fields where the header has 2"),
    "bad UTF-8": (b"a,\xfe\n", "0xfe at column 3 is no UTF-8"),
    "NUL": (b"a,\x00\n", "NUL byte"),
    "text after a quote": (b'"a"b,c\n', "no valid CSV"),
    "a quote never closed": (b'"a,b\n', "no valid CSV"),
}


@pytest.mark.parametrize("case", BAD_CSV)
def test_a_bad_line_of_csv_is_named(case: str, tmp_path: Path) -> None:
    line, why = BAD_CSV[case]
    path = tmp_path / "rows.csv"
    path.write_bytes(b"prompt,response\na,b\n" + line + b"c,d\n")
    problems = _problems(path)
    assert problems[0].startswith(f"{path}:3: ") and why in problems[0]


def test_csv_with_a_name_twice_in_the_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("prompt,prompt\na,b\n")
    assert _problems(path) == (f"{path}:1: the header names prompt twice",)


@pytest.mark.parametrize(
    ("content", "location", "why"),
    [
        (b'[\n{"text": "a"},\n{"text" "b"}\n]', ":3", "no valid JSON"),
        (b'[{"text": "a"}, 7]', ": item 2", "expected an object, found a number"),
        (b'{"a": [], "b": []}', ":1", "found 2 arrays"),
        (b'[\n"\xff"]', ":2", "no UTF-8"),
    ],
)
def test_a_bad_json_file_is_named(content: bytes, location: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    (problem,) = _problems(path)
    assert problem.startswith(f"{path}{location}: ") and why in problem


def test_invalid_text_in_parquet_is_named_by_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    texts = pa.array([b"good", b"bad \xff", b"good"]).view(pa.string())
    pq.write_table(pa.table({"text": texts}), path)
    (problem,) = _problems(path)
    assert problem.startswith(f"{path}: row 2: invalid UTF-8")


def test_a_parquet_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = _parquet(tmp_path / "rows.parquet")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"rows\.parquet cannot be read"):
        _read(path)


def test_ten_problems_come_at_once_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes((GOOD + b"broken\n") * 50)
    problems = _problems(path)
    assert [problem.split(": ")[0] for problem in problems] == [f"{path}:{line}" for line in range(2, 21, 2)]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_an_empty_file_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"")
    with pytest.raises(UserError, match=rf"{name} is empty"):
        column_names(find_source(str(path), "train"))


def test_a_missing_file_and_a_missing_split_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no file or folder .*nothing\.jsonl") as caught:
        find_source(str(tmp_path / "nothing.jsonl"), "train")
    assert caught.value.exit_code == ExitCode.MISSING
    with pytest.raises(UserError, match="no split `validation`") as caught:
        find_source(str(_datasets_splits(tmp_path / "splits")), "validation")
    assert "train, test" in caught.value.hints[0]


def test_a_folder_of_several_kinds_is_refused(tmp_path: Path) -> None:
    _jsonl(tmp_path / "a.jsonl")
    _csv(tmp_path / "b.csv")
    with pytest.raises(UserError, match="several kinds: csv, jsonl"):
        find_source(str(tmp_path), "train")


def test_a_hub_name_without_network_says_what_to_do(tmp_path: Path) -> None:
    """In a process of its own, as the hub library reads HF_HUB_OFFLINE at its import."""
    code = "from trainwright.train.data.sources import find_source; find_source('nobody/nothing', 'train')"
    program = (
        f"from trainwright.errors import UserError\ntry:\n    {code}\nexcept UserError as e:\n    print(e.render())\n"
    )
    program += "    raise SystemExit(e.exit_code)"
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == ExitCode.MISSING, done.stderr
    assert "`nobody/nothing` is no file here" in done.stdout
    assert "datasets.load_dataset('nobody/nothing')" in done.stdout


_MEASURE = """
import sys
from trainwright.train.data.problems import Problems
from trainwright.train.data.rows import read_rows
from trainwright.train.data.sources import find_source

def count(path):
    source = find_source(path, "train")
    return sum(1 for _ in read_rows(source, Problems(source.name), columns=["text"]))

small, large = sys.argv[1:]
count(small)
before = peak_kib()
print(count(large), peak_kib() - before)
"""


def _save_table(path: Path, rows: int) -> Path:
    """Save numbered rows of 500 characters; as parquet, in one row group."""
    table = pa.table({"text": [f"{i:>500}" for i in range(rows)], "unused": ["x" * 100] * rows})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows, compression="none", use_dictionary=False)
    else:
        import datasets

        datasets.Dataset(table).save_to_disk(str(path))
    return path


@pytest.mark.parametrize("suffix", [".parquet", ""])
def test_memory_stays_flat_over_two_hundred_thousand_rows(
    suffix: str, numbers_of: Callable[..., list[int]], tmp_path: Path
) -> None:
    """Reading 100 MB of text grows the process by less than 48 MiB over reading a few rows."""
    rows = 200_000
    small, large = (_save_table(tmp_path / f"{n}{suffix}", n) for n in (1000, rows))
    count, grown_kib = numbers_of(_MEASURE, small, large)
    assert count == rows
    assert grown_kib < 48 * 1024
