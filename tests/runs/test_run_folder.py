from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import saving_run

from trainwright.errors import ExitCode, UserError
from trainwright.runs import RunFolder
from trainwright.runs.checkpoints import newest_valid


def test_the_layout_is_the_documented_one(tmp_path: Path) -> None:
    """Every path of a run, by the names that people and other tools look for."""
    run = RunFolder(tmp_path / "run")
    attributes = {
        "run_json": "run.json",
        "resolved_json": "resolved.json",
        "plan_json": "plan.json",
        "prepared_json": "prepared.json",
        "training_config_json": "training_config.json",
        "tokenizer_dir": "tokenizer",
        "launcher_dir": "launcher",
        "logs_dir": "logs",
        "latest_logs": "logs/latest",
        "events_jsonl": "events.jsonl",
        "metrics_jsonl": "metrics.jsonl",
        "system_jsonl": "system.jsonl",
        "final_model_dir": "final_model",
        "lock_file": "run.lock",
        "fence_json": "fence.json",
    }
    for attribute, name in attributes.items():
        assert getattr(run, attribute) == run.path / name
    assert run.attempt_dir(3) == run.path / "logs/attempt_3"
    assert run.rank_log(3, 0) == run.path / "logs/attempt_3/rank_0.log"
    assert run.checkpoint_dir(40) == run.path / "checkpoint-40"
    assert run.staging_dir(40, 3) == run.path / ".staging-checkpoint-40-attempt-3"


def test_a_run_keeps_its_identity(folder: RunFolder, tmp_path: Path) -> None:
    """C13: two runs differ, and a second create changes nothing."""
    identity = folder.run_id
    folder.create()
    assert RunFolder(folder.path).run_id == identity
    other = RunFolder(tmp_path / "other")
    other.create()
    assert other.run_id != identity


@pytest.mark.parametrize("path", ["../run", "runs/../../etc", "run/..", "a\0b", "a\nb", "a\x1b[2Jb", "a\u202eb"])
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    """X04, X06: before anything is written; the message can be printed on a terminal."""
    with pytest.raises(UserError) as caught:
        RunFolder(path)
    assert caught.value.exit_code == ExitCode.USAGE
    assert all(character.isprintable() or character == "\n" for character in caught.value.render())


@pytest.mark.parametrize("linked", ["run", "logs"])
def test_a_link_in_place_of_a_folder_is_refused(tmp_path: Path, linked: str) -> None:
    """X04: nothing is written where it leads."""
    outside = tmp_path / "outside"
    outside.mkdir()
    run = RunFolder(tmp_path / "run")
    if linked == "logs":
        run.create()
    (run.path if linked == "run" else run.logs_dir).symlink_to(outside)
    with pytest.raises(UserError, match="symbolic link"):
        run.create()
        run.start_attempt()
    assert list(outside.iterdir()) == []


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    """G10: one line, with the path."""
    (tmp_path / "run").write_text("x")
    with pytest.raises(UserError, match="cannot be made: File exists") as caught:
        RunFolder(tmp_path / "run").create()
    assert caught.value.exit_code == ExitCode.STORAGE


def test_a_folder_without_identity_is_not_a_run(tmp_path: Path) -> None:
    """G10: missing and damaged are told apart."""
    run = RunFolder(tmp_path)
    with pytest.raises(UserError, match="not a run folder") as caught:
        newest_valid(run)
    assert caught.value.exit_code == ExitCode.MISSING
    for damaged in ("{", "[]", json.dumps({"run_id": "../x"}), json.dumps({"run_id": 5})):
        run.run_json.write_text(damaged)
        with pytest.raises(UserError, match=r"run\.json"):
            newest_valid(run)


def test_the_room_needs_nothing_but_the_standard_library() -> None:
    """The login node has no torch: what is imported is of Python or of this tool."""
    source = Path(saving_run.__file__).resolve().parents[2] / "src"
    script = (
        f"import sys; sys.path.insert(0, {str(source)!r})\n"
        "import trainwright.runs.checkpoints, trainwright.runs.records\n"
        "own = {name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names) - {'trainwright'}\n"
        "print(sorted(own))"
    )
    done = subprocess.run([sys.executable, "-S", "-E", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['__main__']"
