"""The checks of a finished attempt (S1-23, S1-24, S1-35), and which checkpoint a script is sent back to."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from pathlib import Path

import pytest

from trainwright.launch.own_script.checkpoints import newest_checkpoint
from trainwright.launch.own_script.script_checks import check_attempt, worst
from trainwright.launch.own_script.starting import ScriptStart
from trainwright.plan.layout import Layout
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import append

LAYOUT = Layout(
    device="cuda", visible_devices="0,1", ranks=2, strategy="ddp", precision="bf16", offload="none",
    global_batch_size=8, micro_batch_size=4, gradient_accumulation_steps=1, eval_batch_size=4,
    gradient_checkpointing=False,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    begin(folder)
    return folder


def begin(folder: RunFolder, ranks: int = 2) -> int:
    """Leave what the start of an attempt with so many ranks leaves."""
    attempt = folder.start_attempt()
    ScriptStart(
        attempt=attempt, run_dir=str(folder.path), command=("x",), launcher="torchrun", working_directory="/",
        nodes=1, ranks_per_node=ranks, device="cuda", accelerate_config="/", environment={},
    ).write()  # fmt: skip
    for rank in range(ranks):
        (folder.attempt_dir(attempt) / f"rank_{rank}.started.json").write_text("{}")
    lines = ["Distributed environment: MULTI_GPU", f"Number of processes: {ranks}", f"Number of GPUs: {ranks}", ""]
    folder.rank_log(attempt, 0).write_text("\n".join(lines))
    return attempt


def steps(folder: RunFolder, per_epoch: float, attempt: int = 1) -> None:
    """Leave metrics of two epochs."""
    for step in (1, round(per_epoch), round(2 * per_epoch)):
        append(folder.metrics_jsonl, {"kind": "train", "attempt": attempt, "step": step, "epoch": step / per_epoch})


def told(folder: RunFolder, samples: int | None, attempt: int = 1) -> list[str]:
    return [str(check) for check in check_attempt(folder, attempt, LAYOUT, samples)]


def test_a_good_run_passes_every_check(folder: RunFolder) -> None:
    (folder.attempt_dir(1) / "reported.json").write_text('{"processes": 2}')
    (folder.attempt_dir(1) / "gpus_of_rank_0.json").write_text('{"0": 97, "1": 95}')
    steps(folder, 50)
    assert told(folder, 400) == [
        "check ok: processes: 2 started and joined",
        "check ok: GPUs busy: 0 up to 97 %, 1 up to 95 %",
        "check ok: steps an epoch: 50 (400 samples / 8)",
    ]


def test_processes_that_train_alone_are_found(folder: RunFolder) -> None:
    """T-05, S1-35: both processes run, each for itself and over all of the data; accelerate says so."""
    with folder.rank_log(1, 0).open("a") as log:
        log.write("Distributed environment: DistributedType.NO\nNum processes: 1\n")
    steps(folder, 100)
    checks = check_attempt(folder, 1, LAYOUT, 400)
    assert worst(checks) == "problem"
    assert "2 started, but the script's own group is of 1" in str(checks[0])
    assert "100, 2 times the 50 of 400 samples / 8: every process goes over all" in str(checks[-1])


def test_the_lines_that_the_run_itself_prints_prove_nothing(folder: RunFolder) -> None:
    steps(folder, 50)
    assert told(folder, 400)[0].startswith("check warning: processes: 2 started; whether they train together")


def test_an_idle_gpu_is_a_problem_and_an_unreadable_one_a_warning(folder: RunFolder) -> None:
    """S1-24."""
    path = folder.attempt_dir(1) / "gpus_of_rank_0.json"
    path.write_text('{"0": 97, "1": 0}')
    assert told(folder, None)[1] == "check problem: GPUs: 1 never busy while the script ran"
    path.write_text(json.dumps({"0": 97, "MIG-1": None}))
    assert told(folder, None)[1].startswith("check warning: GPUs: how busy MIG-1 was")


def test_steps_are_compared_with_an_attempt_of_one_process_where_the_samples_are_not_known(folder: RunFolder) -> None:
    """S1-35: a quarter of the steps with four times the batch."""
    alone = dataclasses.replace(LAYOUT, ranks=1, strategy="single", global_batch_size=2, micro_batch_size=2)
    first = begin(folder, ranks=1)
    steps(folder, 200, first)
    check_attempt(folder, first, alone, None)
    second = begin(folder)
    steps(folder, 50, second)
    assert told(folder, None, second)[-1] == f"check ok: steps an epoch: 50 (as attempt {first} with 1 processes)"
    third = begin(folder)
    steps(folder, 100, third)
    assert told(folder, None, third)[-1].startswith("check problem: steps an epoch: 100, 2 times the 50")


def checkpoint(place: Path, step: int, name: str = "checkpoint-{}", **files: bytes) -> Path:
    """Write a checkpoint with these files, their suffix after the first `__`."""
    path = place / name.format(step)
    path.mkdir(parents=True)
    for key, content in files.items():
        (path / key.replace("__", ".")).write_bytes(content)
    return path


def weights(size: int = 16) -> bytes:
    """Return a whole safetensors file."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


def test_the_newest_whole_checkpoint_is_taken_and_the_others_are_named(tmp_path: Path) -> None:
    good = checkpoint(tmp_path, 10, model__safetensors=weights(), state__json=b"{}")
    checkpoint(tmp_path, 20, model__safetensors=weights()[:-1], state__json=b"{}")
    checkpoint(tmp_path, 30, model__safetensors=weights())
    checkpoint(tmp_path, 9, model__safetensors=weights(), state__json=b"{}")
    found = newest_checkpoint(tmp_path)
    assert (found.path, found.step) == (good, 10)
    assert found.skipped == (
        "Skipped checkpoint-30: it has no state.json, as checkpoint-20 has",
        "Skipped checkpoint-20: model.safetensors is cut short",
    )


def test_half_an_archive_of_torch_save_half_a_json_and_an_empty_folder_are_passed_over(tmp_path: Path) -> None:
    archive = tmp_path / "whole.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("data", b"x" * 1000)
    checkpoint(tmp_path, 4)
    checkpoint(tmp_path, 3, optimizer__bin=archive.read_bytes()[:-40])
    checkpoint(tmp_path, 2, trainer_state__json=b'{"step": ')
    whole = checkpoint(tmp_path, 1, optimizer__bin=archive.read_bytes())
    found = newest_checkpoint(tmp_path)
    assert found.path == whole
    assert len(found.skipped) == 3


def test_accelerates_own_names_are_known_and_links_and_other_folders_are_not(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoints", 3, "checkpoint_{}", model__safetensors=weights())
    (tmp_path / "checkpoint-9").symlink_to(path)
    checkpoint(tmp_path, 11, "tmp-checkpoint-{}", model__safetensors=weights())
    checkpoint(tmp_path, 12, "epoch_{}", model__safetensors=weights())
    assert newest_checkpoint(tmp_path).path == path
    assert newest_checkpoint(tmp_path / "nowhere").path is None
