from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import saving_run
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.errors import UserError
from trainwright.runs import records
from trainwright.runs.writing import read_json, write_json_atomic, write_json_once

SOURCE = Path(saving_run.__file__).resolve().parents[2] / "src"


def test_a_killed_writer_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    """C01, C02: 20 kills at random times; the file is always whole, and what was told as written is there."""
    path = tmp_path / "state.json"
    script = (
        f"import sys, os; sys.path.insert(0, {str(SOURCE)!r})\n"
        "from pathlib import Path\n"
        "from trainwright.runs.writing import write_json_atomic\n"
        "start = int(sys.argv[2])\n"
        "for number in range(start, start + 100000):\n"
        "    write_json_atomic(Path(sys.argv[1]), {'number': number, 'filler': [number] * 2000})\n"
        "    os.write(1, b'%d\\n' % number)\n"
    )
    moments_s = random.Random(20)
    last = 0
    for _ in range(20):
        command = [sys.executable, "-S", "-E", "-c", script, str(path), str(last)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            first = writer.stdout.readline()
            time.sleep(moments_s.uniform(0, 0.05))
            writer.kill()
            told = [int(line) for line in (first + writer.stdout.read()).splitlines(keepends=True) if line[-1] == "\n"]
        content = read_json(path)
        assert content["filler"] == [content["number"]] * 2000
        assert content["number"] in (told[-1], told[-1] + 1)
        last = told[-1] + 1
    assert last >= 20


def test_numbers_of_other_libraries_and_infinities_become_plain(tmp_path: Path) -> None:
    """D02: strict JSON, which every reader takes: NaN has no spelling in it."""

    class Scalar:
        def item(self) -> float:
            return 2.5

    path = tmp_path / "x.json"
    written = {"loss": float("nan"), "best": float("inf"), "n": Scalar(), "at": Path("/a/b"), "t": (1, True), 7: 1e-5}
    write_json_atomic(path, written)
    assert read_json(path) == {"loss": None, "best": None, "n": 2.5, "at": "/a/b", "t": [1, True], "7": 1e-5}
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(TypeError, match="set cannot be written"):
        write_json_atomic(path, {"x": {1}})
    assert read_json(path)["n"] == 2.5
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_of_several_first_writers_one_wins(tmp_path: Path) -> None:
    """C15: the identity of a run is written once."""
    for number in range(3):
        write_json_once(tmp_path / "run.json", {"writer": number})
    assert read_json(tmp_path / "run.json") == {"writer": 0}
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_writing_replaces_a_link_and_does_not_follow_it(tmp_path: Path) -> None:
    """X04"""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "x.json").symlink_to(tmp_path / "victim")
    write_json_atomic(tmp_path / "x.json", {"a": 1})
    assert (tmp_path / "victim").read_text() == "precious"
    assert read_json(tmp_path / "x.json") == {"a": 1}
    (tmp_path / "x.jsonl").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError):
        records.append(tmp_path / "x.jsonl", {"a": 1})
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize("text", ["", "{", "nonsense", "[" * 100_000, "\xff"])
def test_damaged_json_is_named(tmp_path: Path, text: str) -> None:
    """G10"""
    (tmp_path / "plan.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"plan\.json is not valid JSON"):
        read_json(tmp_path / "plan.json")


def test_records_come_back_in_order(tmp_path: Path) -> None:
    """D02: one line each, also with line ends inside; a NaN loss is null."""
    path = tmp_path / "metrics.jsonl"
    assert list(records.read(path)) == []
    for step in range(3):
        records.append(path, {"step": step, "loss": float("nan"), "text": "a\nb\u2028c"})
    assert list(records.read(path)) == [{"step": step, "loss": None, "text": "a\nb\u2028c"} for step in range(3)]
    assert len(path.read_bytes().splitlines()) == 3
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_torn_last_line_costs_only_itself(tmp_path: Path) -> None:
    """C01: cut at every byte of the last line, then written on by the next attempt."""
    path = tmp_path / "events.jsonl"
    whole = [{"step": step, "what": "step"} for step in range(2)]
    lines = [json.dumps(record, separators=(",", ":")) + "\n" for record in whole]
    for cut in range(len(lines[1]) + 1):
        path.write_text(lines[0] + lines[1][:cut])
        expected = whole[: 2 if cut >= len(lines[1]) - 1 else 1]
        assert list(records.read(path)) == expected, cut
        records.append(path, {"what": "resumed"})
        assert list(records.read(path)) == [*expected, {"what": "resumed"}], cut


@settings(max_examples=300, deadline=None, derandomize=True)
@given(garbage=st.binary(max_size=200))
def test_garbage_among_records_is_passed_over(tmp_path_factory: pytest.TempPathFactory, garbage: bytes) -> None:
    """D04: no exception, and the records around it are there."""
    path = tmp_path_factory.mktemp("records") / "x.jsonl"
    records.append(path, {"first": 1})
    with path.open("ab") as file:
        file.write(garbage)
    records.append(path, {"last": 1})
    found = list(records.read(path))
    assert found[0] == {"first": 1} and found[-1] == {"last": 1}
