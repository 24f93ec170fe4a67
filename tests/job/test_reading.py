"""One YAML 1.2 file: values as written, a place for every key, and nothing that a job file has no need of."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.errors import UserError
from trainwright.job.origins import Origin
from trainwright.job.yaml_document import MAX_BYTES, MAX_DEPTH, MAX_VALUES, Document, read_file, read_keys, read_yaml


def at(line: int, column: int) -> Origin:
    return Origin("file", f"job.yaml:{line}:{column}")


def read(text: str) -> Document:
    return read_yaml(text, at)


def problems(text: str) -> list[str]:
    return [str(problem) for problem in read_keys(text, at).problems]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("2e-5", 2e-5),
        ("no", "no"),
        ("on", "on"),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("12:30:00", "12:30:00"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("~", None),
        ("", None),
        ("true", True),
        ("-3", -3),
        ("3.0", 3.0),
        ('"3"', "3"),
        ("'no'", "no"),
        ("a#b", "a#b"),
        ("[q_proj, v_proj]", ["q_proj", "v_proj"]),
        ("{no: 1}", {"no": 1}),
    ],
)
def test_values_follow_yaml_1_2(written: str, value: object) -> None:
    """The traps of YAML 1.1: truth values, octal numbers, times and exponents mean what they look like."""
    document = read(f"key: {written}\n")
    assert document.problems == []
    assert document.values == {"key": value}
    assert type(document.values["key"]) is type(value)


def test_every_key_has_its_place() -> None:
    document = read_keys(
        "# a comment\nname: a\nmodel:\n  from_scratch:\n    dimensions: {x: 1,  y: 2}\nlist:\n- a\n- b: c\n", at
    )
    places = {path: origin.location.removeprefix("job.yaml:") for path, origin in document.origins.items()}
    assert places == {
        (): "2:1",
        ("name",): "2:1",
        ("model",): "3:1",
        ("model", "from_scratch"): "4:3",
        ("model", "from_scratch", "dimensions"): "5:5",
        ("model", "from_scratch", "dimensions", "x"): "5:18",
        ("model", "from_scratch", "dimensions", "y"): "5:25",
        ("list",): "6:1",
        ("list", 0): "7:3",
        ("list", 1): "8:3",
        ("list", 1, "b"): "8:3",
    }


def test_all_that_is_refused_is_told_at_once() -> None:
    found = problems(
        'a: &x 1\nb: *x\nc: !!python/name:os.system ""\na: 2\nd: .inf\ne: "\\e[31m"\nf: 9999999999999999999\n'
    )
    assert found == [
        "job.yaml:1:4: a: the anchor `&x` is not allowed; remove it",
        "job.yaml:2:4: b: the alias `*x` is not allowed; write the value out",
        "job.yaml:3:4: c: a tag such as `!!int` is not allowed; remove it",
        "job.yaml:4:1: a: the key is given twice; first at job.yaml:1:1",
        "job.yaml:5:4: d: the number is not finite",
        "job.yaml:6:4: e: the character U+001B is not allowed",
        "job.yaml:7:4: f: a whole number has at most 18 digits",
    ]


def test_a_repeated_key_is_found_in_a_deep_section() -> None:
    assert problems("a:\n  b: {c: 1, d: 2, c: 3}\n") == [
        "job.yaml:2:19: a.b.c: the key is given twice; first at job.yaml:2:7"
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "job.yaml:1:1: the file is empty"),
        ("# nothing\n", "job.yaml:1:1: the file is empty"),
        ("- a\n", "job.yaml:1:1: the top level is no mapping"),
        ("just text\n", "job.yaml:1:1: the top level is no mapping"),
        ("a: 1\n---\nb: 2\n", "job.yaml:2:1: a second document starts here"),
        ("%YAML 1.1\n---\na: 1\n", "job.yaml:2:1: the only directive"),
        ("a: b: c\n", "job.yaml:1:5: this is not YAML: mapping values are not allowed here"),
        ("a:\n\t- b\n", "job.yaml:2:1: this is not YAML"),
        ('a: "x\n', "job.yaml:2:1: this is not YAML"),
        ("? [a]\n: 1\n", "job.yaml:1:3: a key is a plain name"),
        ("a: 1\nb: \x07\n", "job.yaml:2:4: the character U+0007 is not allowed"),
        ("a: \u202egnp.exe\n", "job.yaml:1:4: the character U+202E is not allowed"),
        ('a: 1\nb: "\\U00110000"\n', "job.yaml:2:1: an escape after this place names no character"),
        ("a: " + "[" * (MAX_DEPTH + 1), f"job.yaml:1:{MAX_DEPTH + 3}: values are nested more than"),
        ("a: [" + "1," * MAX_VALUES, "job.yaml:1:"),
    ],
)
def test_what_is_no_job_file_is_told_with_its_place(text: str, problem: str) -> None:
    document = read_keys(text, at)
    assert not document.readable
    assert len(document.problems) == 1
    assert str(document.problems[0]).startswith(problem)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 900_000,
        "{a: " * 200_000,
        "a: [" + "x, " * 300_000,
        "- " * 400_000,
        "a: &a [x]\n" + "".join(f"b{i}: [*a, *a, *a]\n" for i in range(50_000)),
        "a: " + "9" * 900_000,
        '"' + "a" * 900_000,
    ],
    ids=["brackets", "braces", "long list", "dashes", "aliases", "digits", "quote"],
)
def test_a_hostile_megabyte_is_refused_quickly(text: str) -> None:
    began = time.process_time()
    assert problems(text)
    assert time.process_time() - began < 5


@settings(deadline=None)  # a busy machine is no hang; those are looked for above
@given(st.text(max_size=200) | st.text(alphabet="ab:-[]{}&*!|>'\"%@#,?\\ \n\t0.~<", max_size=60))
def test_no_text_ends_in_a_traceback(text: str) -> None:
    document = read_yaml(text, at)
    assert document.readable or document.problems


def test_a_missing_file_a_folder_and_bad_bytes_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no job file"):
        read_file(tmp_path / "absent.yaml", "job")
    with pytest.raises(UserError, match="is a folder"):
        read_file(tmp_path, "job")
    with pytest.raises(UserError, match="cannot be read: File name too long"):
        read_file(tmp_path / ("a" * 300), "job")
    with pytest.raises(UserError, match="not a regular file"):
        read_file(Path("/dev/zero"), "job")
    bad = tmp_path / "bad.yaml"
    bad.write_bytes(b"name: a\nmodel: \xff\n")
    with pytest.raises(UserError) as caught:
        read_file(bad, "job")
    assert caught.value.problems == (f"{bad}:2:8: the byte 0xff is not UTF-8",)
    bad.write_bytes(b"a" * (MAX_BYTES + 1))
    with pytest.raises(UserError, match="larger than 1,000,000 bytes"):
        read_file(bad, "job")


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(b"\xef\xbb\xbfname: a\r\ntask: b\r\n")
    assert read(read_file(file, "job")).values == {"name": "a", "task": "b"}
