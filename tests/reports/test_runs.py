"""`trainwright runs`: the index, what it shows of each run, and how it is made again."""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from written_runs import BEGAN_S, WrittenRun, trainwright

from trainwright.errors import ExitCode, UserError
from trainwright.reports.listing import moment
from trainwright.runs import index
from trainwright.runs.user_data import user_data_dir


@pytest.fixture
def empty_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user without runs, and the folder for some."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data-home"))
    (tmp_path / "outputs").mkdir()
    yield tmp_path / "outputs"


def listed(*arguments: object) -> list[dict[str, Any]]:
    """What `trainwright runs --json` lists."""
    done = trainwright("runs", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    return list(document["runs"])


def test_a_run_that_began_is_in_the_index_and_the_list_is_what_its_folder_says(real_run: Path) -> None:
    """Issue 7: `train` notes where the run is, once; all the rest comes from the folder."""
    (place,) = [place for place in index.known() if place.path == str(real_run)]
    assert place.run_id == json.loads((real_run / "run.json").read_text())["run_id"]
    (run,) = [run for run in listed() if run["folder"] == str(real_run)]
    assert (run["name"], run["state"], run["exit_code"], run["meaning"]) == ("tiny", "finished", 0, "done")
    assert (run["step"], run["total_steps"], run["strategy"], run["devices"]) == (8, 8, "single", "1 x cpu")
    assert run["model"] == "gpt2 from scratch" and run["duration_s"] > 0 and 0 < run["loss"] < 10
    lines = trainwright("runs").stdout.splitlines()
    assert lines[0].split()[:4] == ["name", "state", "began", "time"]
    assert any(line.startswith("tiny") and "8/8" in line and str(real_run) in line for line in lines)


def test_each_run_is_listed_as_it_ended(empty_index: Path) -> None:
    """State, what the exit code means, how far it came; the newest first; filters."""
    for number, (name, event) in enumerate({"done": "finished", "paused": "stopped", "broken": "failed"}.items()):
        run = WrittenRun(empty_index, name=name)
        at_s = BEGAN_S + 86400 * number
        run.begin(at_s=at_s)
        run.train(1, 5)
        run.sample(2, at_s=at_s)
        more = {"rank": 1, "exit_code": 73, "text": "error: no room\n\nhint: free some"} if event == "failed" else {}
        run.end(event, at_s=at_s + 90, **more)
        assert index.add(run.folder) is None and index.add(run.folder) is None
    assert len(user_data_dir().joinpath("runs.jsonl").read_text().splitlines()) == 3
    runs = listed()
    assert [(run["name"], run["state"], run["exit_code"]) for run in runs] == [
        ("broken", "failed", 73),
        ("paused", "stopped", 75),
        ("done", "finished", 0),
    ]
    assert runs[0]["meaning"] == "the storage failed or had no room: error: no room"
    assert {run["duration_s"] for run in runs} == {90.0} and {run["devices"] for run in runs} == {
        "2 x NVIDIA A100-SXM4-40GB"
    }
    assert {(run["model"], run["step"], run["total_steps"]) for run in runs} == {("Qwen/Qwen3-0.6B", 5, 100)}
    assert [run["name"] for run in listed("--state", "stopped", "--state", "failed")] == ["broken", "paused"]
    since = datetime.datetime.fromtimestamp(BEGAN_S + 86000).isoformat()
    assert [run["name"] for run in listed("--since", since)] == ["broken", "paused"]
    assert listed("--since", "1min") == []
    wrong = trainwright("runs", "--state", "dead")
    assert wrong.returncode == ExitCode.USAGE and "silent, missing" in wrong.stderr
    wrong = trainwright("runs", empty_index)
    assert wrong.returncode == ExitCode.USAGE and "--rebuild" in wrong.stderr


def test_a_folder_that_is_no_longer_there_is_told_and_not_shown_as_if_it_were(empty_index: Path) -> None:
    moved, removed, replaced = (WrittenRun.whole(empty_index, name=name) for name in ("moved", "removed", "replaced"))
    for run in (moved, removed, replaced):
        index.add(run.folder)
    moved.folder.path.rename(empty_index / "elsewhere")
    shutil.rmtree(removed.folder.path)
    shutil.rmtree(replaced.folder.path)
    WrittenRun.whole(empty_index, name="replaced")
    runs = {run["name"]: run for run in listed()}
    assert {run["state"] for run in runs.values()} == {"missing"}
    assert runs["moved"]["meaning"] == "its folder was moved or deleted"
    assert runs["replaced"]["meaning"] == "another run is in its folder now"
    assert runs["removed"]["step"] is None

    done = trainwright("runs", "--rebuild", empty_index)
    assert done.returncode == 0 and "2 runs found" in done.stderr
    assert {(run["name"], run["state"]) for run in listed()} == {("elsewhere", "finished"), ("replaced", "finished")}


def test_a_moved_run_that_goes_on_is_listed_once(empty_index: Path) -> None:
    run = WrittenRun.whole(empty_index, name="before")
    index.add(run.folder)
    run.folder.path.rename(empty_index / "after")
    index.add(type(run.folder)(empty_index / "after"))
    assert [found["name"] for found in listed()] == ["after"]


def test_the_index_can_be_lost_or_damaged_and_made_again_from_the_folders(empty_index: Path) -> None:
    """Issue 7: it can always be rebuilt; runs that it knows elsewhere stay."""
    deep = WrittenRun.whole(empty_index / "project" / "x", name="deep")
    elsewhere = WrittenRun.whole(empty_index.parent / "scratch", name="kept")
    index.add(elsewhere.folder)
    with index.index_file().open("a") as file:
        file.write('{"run_id": 3}\nnonsense\n{"run_id":"a","pa')
    (empty_index / "loop").symlink_to(empty_index)
    (empty_index / "foreign").mkdir()
    (empty_index / "foreign" / "run.json").write_text("[]")
    done = trainwright("runs", "--rebuild", empty_index, "--json")
    assert {run["name"] for run in json.loads(done.stdout)["runs"]} == {"deep", "kept"}, done.stderr
    assert [json.loads(line)["path"] for line in index.index_file().read_text().splitlines()] == [
        str(elsewhere.folder.path),
        str(deep.folder.path),
    ]
    done = trainwright("runs", "--rebuild", empty_index / "nowhere")
    assert done.returncode == ExitCode.MISSING and "there is no folder" in done.stderr


def test_nothing_to_list_says_how_to_find_runs(empty_index: Path) -> None:
    done = trainwright("runs")
    assert (done.returncode, done.stdout) == (0, "") and "--rebuild" in done.stderr
    assert listed() == []


def test_an_index_that_cannot_be_written_ends_no_run(empty_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = WrittenRun.whole(empty_index)
    blocked = empty_index / "a-file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(blocked))
    why = index.add(run.folder)
    assert why is not None and "will not list this run" in why


def test_a_moment_is_a_date_or_a_time_back_from_now() -> None:
    assert moment("36h", now_s=1e6) == 1e6 - 36 * 3600 and moment("2w", now_s=2e6) == 2e6 - 14 * 86400
    assert moment("2026-11-22T08:30:00+00:00") == 1795336200.0
    assert moment("2026-11-22") == datetime.datetime(2026, 11, 22).timestamp()
    for text in ("yesterday", "7", "-3d", "99999999d", "\x1b[2J"):
        with pytest.raises(UserError) as refusal:
            moment(text)
        assert "\x1b" not in refusal.value.render()
