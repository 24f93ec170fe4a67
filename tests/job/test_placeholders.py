"""Placeholders in the command of a user's own script: known ones, escapes, and what is left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.errors import UserError
from trainwright.job.loading import load_job
from trainwright.job.placeholders import PLACEHOLDERS, filled, problem_of

VALUES: dict[str, str | None] = dict.fromkeys(PLACEHOLDERS, "v") | {"resume_from": None, "model": "{data} $(x) '"}


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        (["t.py", "--lr={learning_rate}", "a{ranks}b{seed}"], ["t.py", "--lr=v", "avbv"]),
        (["t.py", "{{}}", "{{ranks}}", '{{"a": {ranks}}}'], ["t.py", "{}", "{ranks}", '{"a": v}']),
        (["t.py", "{model}"], ["t.py", "{data} $(x) '"]),
        (["t.py", "--resume", "{resume_from}", "--x"], ["t.py", "--x"]),
        (["t.py", "--resume={resume_from}", "--x"], ["t.py", "--x"]),
        (["t.py", "resume", "{resume_from}"], ["t.py", "resume"]),
        (["t.py", "--a=1", "{resume_from}"], ["t.py", "--a=1"]),
        (["t.py", "--a", "{resume_from}", "{resume_from}"], ["t.py"]),
    ],
)
def test_a_command_is_filled_one_argument_an_element(command: list[str], wanted: list[str]) -> None:
    assert filled(command, VALUES) == wanted


@given(st.text())
def test_any_text_is_refused_or_filled_without_a_trace_of_a_template(text: str) -> None:
    if problem_of(text) is None:
        assert len(filled([text], dict.fromkeys(PLACEHOLDERS, "v"))) == 1
    escaped = text.replace("{", "{{").replace("}", "}}")
    assert problem_of(escaped) is None
    assert filled([escaped], VALUES) == [text]


def load(place: Path, text: str) -> str:
    """Return the text of the refusal of a job file."""
    (place / "job.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        load_job(str(place / "job.yaml"))
    return caught.value.render()


def test_an_unknown_placeholder_is_told_with_its_place_and_the_nearest(tmp_path: Path) -> None:
    error = load(tmp_path, 'name: a\nscript: [python, t.py, "{mirco_batch_size}"]\n')
    assert "job.yaml:2:24: script[2]: unknown placeholder `{mirco_batch_size}`; did you mean" in error
    assert "`{micro_batch_size}`?" in error


def test_a_command_is_a_list_and_starts_with_a_program(tmp_path: Path) -> None:
    assert "expected a list of text" in load(tmp_path, "name: a\nscript: python t.py\n")
    assert "the first element is the program" in load(tmp_path, "name: a\nscript: [--x]\n")
    assert "a single `{`: write `{{`" in load(tmp_path, 'name: a\nscript: [t.py, "{"]\n')
    assert "`launcher` is for a `script`" in load(tmp_path, "name: a\nmodel: {name: m}\nlauncher: torchrun\n")


def test_only_a_job_with_a_script_may_leave_the_model_out(tmp_path: Path) -> None:
    assert "model: this key is needed" in load(tmp_path, "name: a\n")
    (tmp_path / "job.yaml").write_text("name: a\nscript: [t.py]\n")
    assert not load_job(str(tmp_path / "job.yaml")).job.model.is_named
