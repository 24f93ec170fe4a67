"""A run whose base model, tokenizer or task was rewritten in place between two attempts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from real_runs import CompletedRun, RunTrain, WriteJob

from trainwright.errors import UserError
from trainwright.runs.folder import RunFolder
from trainwright.train.stopping import StopRequest
from trainwright.train.worker import run_rank

TASK = """
from trainwright.train.tasks.causal_lm import CausalLM


class Mine(CausalLM):
    pass
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Path:
    """A base of the module's own, so that it can be rewritten."""
    return Path(shutil.copytree(base_model, tmp_path_factory.mktemp("rewritten") / "base"))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, write_job: WriteJob, base: Path) -> Path:
    folder = tmp_path_factory.mktemp("changed-files")
    (folder / "mine.py").write_text(TASK)
    return write_job(
        folder,
        model={"name": str(base)},
        task="mine:Mine",
        method={"type": "lora", "r": 4},
        train={"learning_rate": 5e-3, "max_steps": 4},
        checkpoint={"every": "2 steps", "keep": 2},
    )


@pytest.fixture(scope="module")
def half_way(job: Path, run_train: RunTrain) -> Path:
    """The checkpoint in the middle of a LoRA run of four steps."""
    run = run_train(job)
    assert run.exit_code == 0, run.stderr
    return run.folder / "checkpoint-2"


@contextmanager
def rewritten(path: Path) -> Iterator[None]:
    """Turn the last numbers of a file, in place: the same path, inode, size and time of change."""
    before, times = path.read_bytes(), path.stat()
    tail = bytes(byte ^ 0x01 for byte in before[-4096:])
    _overwrite(path, before[:-4096] + tail)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    try:
        yield
    finally:
        _overwrite(path, before)


def _overwrite(path: Path, content: bytes) -> None:
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


def resumed(run_train: RunTrain, job: Path, checkpoint: Path, *arguments: str) -> CompletedRun:
    return run_train(job, "--resume", str(checkpoint), *arguments)


def test_harm_06_other_base_weights_are_refused_by_the_files_name(
    half_way: Path, job: Path, base: Path, run_train: RunTrain
) -> None:
    """Before any rank starts: the file, what was, what is, and the flag that goes on with it as it is."""
    kept = (half_way.parent / "prepared.json").read_text()
    with rewritten(base / "model.safetensors"):
        run = resumed(run_train, job, half_way)
    assert run.exit_code == 2, run.stderr
    assert "model.safetensors (model.name): " in run.stderr
    size = f"{(base / 'model.safetensors').stat().st_size:,} bytes, sha256 "
    assert run.stderr.count(size) == 2
    assert "--allow model.name" in run.stderr
    assert "Contract: exact" not in run.stderr and "Running:" not in run.stderr
    assert (half_way.parent / "prepared.json").read_text() == kept


def test_harm_06_an_own_task_that_was_edited_is_refused(half_way: Path, job: Path, run_train: RunTrain) -> None:
    """It makes the same tokens, so that the data are the same; what it computes of them is not known."""
    task = job.parent / "mine.py"
    task.write_text(TASK + "\n# edited\n")
    run = resumed(run_train, job, half_way)
    task.write_text(TASK)
    assert run.exit_code == 2, run.stderr
    assert "mine.py (task): " in run.stderr and "--allow task" in run.stderr


def test_harm_06_another_padding_token_is_refused(half_way: Path, job: Path, base: Path, run_train: RunTrain) -> None:
    """The tokens are the same, and so are the data; the embedding of the padding token is what is not trained."""
    config = base / "tokenizer_config.json"
    before = config.read_text()
    config.write_text(json.dumps(json.loads(before) | {"pad_token": "<unk>"}))
    run = resumed(run_train, job, half_way)
    config.write_text(before)
    assert run.exit_code == 2, run.stderr
    assert "pad_token_id (model.tokenizer): 0 -> 3" in run.stderr


def test_harm_06_what_was_allowed_goes_on_and_is_not_called_exact(
    half_way: Path, job: Path, base: Path, run_train: RunTrain
) -> None:
    """With the user's word, and with the words of what it then is."""
    shutil.copytree(half_way.parent, half_way.parent.with_name("allowed"), symlinks=True)
    checkpoint = half_way.parent.with_name("allowed") / half_way.name
    with rewritten(base / "model.safetensors"):
        run = resumed(run_train, job, checkpoint, "name=allowed", "--allow", "model.name")
    assert run.exit_code == 0, run.stderr
    assert "Contract: same samples and learning rate a step, computed with other files" in run.stderr
    assert "model.safetensors (model.name): " in run.stderr


def test_harm_06_the_same_base_is_exact_and_an_older_run_is_told_that_it_was_not_compared(
    half_way: Path, job: Path, run_train: RunTrain
) -> None:
    """A checkpoint of an earlier version holds no hashes: it goes on, and nothing is claimed of the base."""
    from trainwright.runs.checkpoints import read_manifest
    from trainwright.runs.manifest import MANIFEST_NAME

    older = Path(shutil.copytree(half_way.parent, half_way.parent.with_name("older"), symlinks=True)) / half_way.name
    manifest = read_manifest(older)
    assert manifest.contract.pop("inputs")["model.name"].keys() == {"config.json", "model.safetensors"}
    (older / MANIFEST_NAME).write_bytes(manifest.to_bytes())
    run = resumed(run_train, job, older, "name=older")
    assert run.exit_code == 0, run.stderr
    assert "Contract: exact" in run.stderr
    assert "not compared: the files of model.name" in run.stderr
    again = resumed(run_train, job, half_way.parent.with_name("older") / "checkpoint-4", "name=older")
    assert "Contract: exact" in again.stderr and "not compared" not in again.stderr


def test_harm_06_full_fine_tuning_goes_on_without_its_base(
    job: Path, base: Path, run_train: RunTrain, half_way: Path
) -> None:
    """All its weights are in the checkpoint: what became of the base's changes nothing."""
    full = ("name=full", "method.type=full")
    run = run_train(job, *full)
    assert run.exit_code == 0, run.stderr
    final = (run.folder / "final_model" / "model.safetensors").read_bytes()
    with rewritten(base / "model.safetensors"):
        again = resumed(run_train, job, run.folder / "checkpoint-2", *full)
    assert again.exit_code == 0, again.stderr
    assert "Contract: exact" in again.stderr
    assert (run.folder / "final_model" / "model.safetensors").read_bytes() == final


def test_harm_06_a_hub_model_keeps_the_commit_that_the_run_began_with(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's `main` has moved on, both are in its cache: the run's own commit is found, and its files are hashed."""
    from huggingface_hub import constants

    from trainwright.job.schema import Job
    from trainwright.train.inputs import base_folder, deciding_files

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--tiny"
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(base, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    values = {"name": "x", "data": {"path": "x.jsonl"}, "method": {"type": "lora"}, "model": {"name": "owner/tiny"}}
    job = Job.model_validate(values)
    first = base_folder(job, None)
    assert first == (repository / "snapshots" / ("a" * 40), "a" * 40)
    (repository / "refs" / "main").write_text("b" * 40)
    assert base_folder(job, None)[1] == "b" * 40
    assert base_folder(job, first[1]) == first
    files = deciding_files(job, first[0], None)["model.name"]
    assert files == {name: str(first[0] / name) for name in ("config.json", "model.safetensors")}
    gone = Job.model_validate(values | {"model": {"name": "owner/never"}})
    assert base_folder(gone, None) == (None, None)


def test_a_plan_for_another_global_batch_is_not_run(tmp_path: Path) -> None:
    """Both files of the run folder hold it; a rank does not choose between them."""
    job = {"name": "x", "model": {"name": "m"}, "data": {"path": "d.jsonl"}, "train": {"global_batch_size": 8}}
    folder = RunFolder(tmp_path)
    folder.resolved_json.write_text(json.dumps(job))
    folder.plan_json.write_text(json.dumps({"layout": {"global_batch_size": 16}}))
    folder.prepared_json.write_text(json.dumps({"model_commit": None}))
    with pytest.raises(UserError) as caught:
        run_rank(tmp_path, StopRequest())
    told = caught.value.render()
    assert "resolved.json says train.global_batch_size=8, and plan.json is for 16" in told and "hint:" in told
