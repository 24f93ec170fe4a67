"""`tune --write` changes one line of a job file, and nothing where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwright.errors import UserError
from trainwright.tune.job_file import set_in_job

MICRO = {("train", "micro_batch_size"): 12}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "name: a  # mine\ntrain:  # how\n  # why\n  micro_batch_size: auto  # to be tuned\n  seed: 3\n",
            "name: a  # mine\ntrain:  # how\n  # why\n  micro_batch_size: 12  # to be tuned\n  seed: 3\n",
        ),
        ("train:\n    seed: 3\nname: a\n", "train:\n    micro_batch_size: 12\n    seed: 3\nname: a\n"),
        ("name: a # no end of line", "name: a # no end of line\ntrain:\n  micro_batch_size: 12\n"),
        (
            "eval:\n  micro_batch_size: 1\ntrain:\n\n  seed: 3\n\n  micro_batch_size: 4\n",
            "eval:\n  micro_batch_size: 1\ntrain:\n\n  seed: 3\n\n  micro_batch_size: 12\n",
        ),
        ("train:\nname: a\n", "train:\n  micro_batch_size: 12\nname: a\n"),
    ],
)
def test_one_line_changes_and_comments_stay(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(before)
    path.chmod(0o640)
    set_in_job(path, MICRO)
    assert path.read_text() == after
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("text", ["train: {seed: 3}\n", '{"train": {"seed": 3}}\n', "train:\n  seed: 3\n bad\n"])
def test_a_file_that_is_not_in_lines_is_left_alone_and_the_line_is_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        set_in_job(path, MICRO)
    assert refused.value.hints == ("write into it yourself: train: {micro_batch_size: 12}",)
    assert path.read_text() == text


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text("train:\n  micro_batch_size: 1\n")
    link = tmp_path / "job.yaml"
    link.symlink_to("real.yaml")
    set_in_job(link, MICRO)
    assert link.is_symlink()
    assert (tmp_path / "real.yaml").read_text() == "train:\n  micro_batch_size: 12\n"
