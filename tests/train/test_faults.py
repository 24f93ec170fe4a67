"""Bad storage, damaged and planted files, changed data, NaN: a documented exit code, and nothing is lost."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disturbed_runs import LiveRun, WriteDropoutJob, assert_same_end, finish, ledger, newest_step

from trainwright.runs import RunFolder, free_bytes
from trainwright.runs.checkpoints import read_manifest
from trainwright.runs.records import read

FAULTS = Path(__file__).with_name("faults")
SECRETS = {"HF_TOKEN": "hf_CanaryCanaryCanaryCanaryCanary0000", "WANDB_API_KEY": "ca11ab1e" * 5}
ALONE = {"ranks": 1, "strategy": "single"}


def faulty(kind: str, *, rank: int = 0) -> dict[str, str]:
    """Return the environment that has a storage fault in one rank."""
    path = os.pathsep.join([str(FAULTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "FAULT": kind, "FAULT_RANK": str(rank)}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path] | None]:
    """Makes a disk of so many KiB; None where this user may not mount one."""
    mounted: list[Path] = []

    def make(size_kib: int) -> Path:
        disk = tmp_path / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(disk)], check=True)
        mounted.append(disk)
        return disk

    probe = tmp_path / "probe"
    probe.mkdir()
    able = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(probe)], capture_output=True)
    if able.returncode == 0:
        subprocess.run(["umount", str(probe)], check=True)
    yield make if able.returncode == 0 else None
    for disk in mounted:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture(scope="module")
def half_way(dropout_job: WriteDropoutJob, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the dropout job, run with secrets in the environment and stopped with three checkpoints."""
    folder = dropout_job(tmp_path_factory.mktemp("half-way"), checkpoint={"every": "10 steps"})
    with LiveRun(folder, folder / "runs" / "run", [], environment=SECRETS) as run:
        run.wait_for_step(31)
        run.launcher.send_signal(signal.SIGTERM)
        assert run.end() == 75, run.said
    return folder


@pytest.fixture
def stopped(half_way: Path, tmp_path: Path) -> LiveRunFolder:
    """A copy of it."""
    folder = tmp_path / "copy"
    shutil.copytree(half_way, folder, symlinks=True)
    job = json.loads((folder / "job.yaml").read_text())
    (folder / "job.yaml").write_text(json.dumps(job | {"output_dir": str(folder / "runs")}))
    return folder, RunFolder(folder / "runs" / "run")


LiveRunFolder = tuple[Path, RunFolder]


def damage(checkpoint: Path, pattern: str) -> str:
    """Flip one bit in the middle of a file and return its name."""
    path = sorted(checkpoint.glob(pattern))[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path.name


def test_damaged_and_foreign_checkpoints_are_named_and_the_newest_whole_one_is_used(
    stopped: LiveRunFolder, undisturbed: Path
) -> None:
    """C09, C10, C13: cut short, one bit flipped, another run's: each skipped for its own reason."""
    folder, run = stopped
    (last, newest), (_, second), (_, third) = run.checkpoints()
    foreign = run.checkpoint_dir(9999)
    shutil.copytree(undisturbed / "checkpoint-120", foreign)
    cut = newest / "model-00001-of-00002.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    flipped = damage(second, "optimizer-00002*")
    assert last > 30
    said = finish(folder, run.path)
    assert "Skipped checkpoint-9999: it belongs to another run" in said
    assert f"Skipped {newest.name}: {cut.name} has" in said
    assert f"Skipped {second.name}: {flipped} does not have the sha256" in said
    assert f"Resuming from {third.name}" in said
    assert foreign.is_dir()
    assert_same_end(run.path, undisturbed)


@pytest.mark.long
def test_where_no_checkpoint_is_whole_only_fresh_starts_again(stopped: LiveRunFolder, undisturbed: Path) -> None:
    """C11, C12: exit 79 with each checkpoint and what is wrong with it; --fresh keeps the old folder aside."""
    folder, run = stopped
    missing = {path.name: damage(path, "model-0*") for _, path in run.checkpoints()}
    (run.checkpoints()[0][1] / "optimizer-00001-of-00002.safetensors").unlink()
    attempts = json.loads(run.fence_json.read_text())["attempt"]
    with LiveRun(folder, run.path, []) as again:
        assert again.end() == 79, again.said
    for checkpoint in missing:
        assert f"Skipped {checkpoint}: " in again.said
    assert "--fresh" in again.said
    assert again.attempt == attempts
    finish(folder, run.path, "--fresh")
    aside = run.path.with_name("run.old-1")
    assert {path.name for _, path in RunFolder(aside).checkpoints()} == set(missing)
    assert_same_end(run.path, undisturbed)


def test_what_was_planted_in_a_checkpoint_is_neither_run_nor_read(
    stopped: LiveRunFolder, undisturbed: Path, tmp_path: Path
) -> None:
    """X01, G9: pickles under every name that some loader opens, and a shard that the manifest does not list."""
    folder, run = stopped
    newest = run.checkpoints()[0][1]
    canary = tmp_path / "canary"
    for name in (
        "optimizer.pt",
        "scheduler.pt",
        "rng_state_0.pth",
        "training_args.bin",
        "pytorch_model.bin",
        "custom_checkpoint_0.pkl",
        ".metadata",
    ):
        (newest / name).write_bytes(pickle.dumps(Plant(str(canary))))
    shard = newest / "model-00002-of-00002.safetensors"
    forged = shard.read_bytes()
    (newest / "model-00003-of-00003.safetensors").write_bytes(forged[: len(forged) - 64] + bytes(64))
    said = finish(folder, run.path)
    assert f"Resuming from {newest.name}" in said
    assert not canary.exists()
    assert_same_end(run.path, undisturbed)


class Plant:
    """Touches a file when it is unpickled."""

    def __init__(self, canary: str) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (self._canary, "w")


def test_changed_data_are_refused(stopped: LiveRunFolder, question_file: Path) -> None:
    """R06: one answer is another; the run and its checkpoints stay as they were."""
    folder, run = stopped
    before = newest_step(run.path)
    rows = [json.loads(line) for line in question_file.read_text().splitlines()]
    rows[40]["answer"] += " Yes."
    edited = folder / "edited.jsonl"
    edited.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with LiveRun(folder, run.path, [f"data.path={edited}"]) as again:
        assert again.end() == 2, again.said
    assert re.search(r"^  data: \S+ -> \S+$", again.said, re.MULTILINE), again.said
    assert "data.path" in again.said
    assert newest_step(run.path) == before


def test_secrets_of_the_environment_are_nowhere_on_disk(half_way: Path) -> None:
    """X05, G8: not in the run folder, not in what was printed."""
    texts = {path: path.read_bytes() for path in half_way.rglob("*") if path.is_file()}
    assert len(texts) > 20
    for path, text in texts.items():
        for name, secret in SECRETS.items():
            assert secret.encode() not in text, f"{name} is in {path}"


def test_a_full_disk_ends_in_exit_73_and_the_run_goes_on_once_there_is_room(
    dropout_job: WriteDropoutJob,
    undisturbed: Path,
    small_disk: Callable[[int], Path] | None,
    tmp_path: Path,
) -> None:
    """C04: half of a checkpoint fits; the figures are told, nothing half-written is left, the end is the same."""
    disk = small_disk(6 * 1024) if small_disk else tmp_path
    folder = dropout_job(tmp_path, output_dir=str(disk / "runs"), checkpoint={"every": "20 steps"})
    run_dir = disk / "runs" / "run"
    with LiveRun(folder, run_dir, [], environment=None if small_disk else faulty("small-files")) as run:
        if small_disk:
            run.wait_for_step(21)
            half = sum(path.stat().st_size for path in (run_dir / "checkpoint-20").iterdir()) // 2
            (disk / "ballast").write_bytes(bytes(free_bytes(disk) - half))
        assert run.end() == 73, run.said
    assert re.search(r"error: saving checkpoint-\d+ failed: .*needs [\d,]+ bytes, free were [\d,]+", run.said), run.said
    assert newest_step(run_dir) == (ledger(run_dir)[-1]["step"] - 20 if small_disk else 0)
    assert not list(run_dir.glob(".staging*"))
    (disk / "ballast").unlink(missing_ok=True)
    finish(folder, run_dir)
    assert_same_end(run_dir, undisturbed)


def test_too_little_room_is_refused_before_the_first_step(
    dropout_job: WriteDropoutJob, undisturbed: Path, small_disk: Callable[[int], Path] | None, tmp_path: Path
) -> None:
    """C08: with an estimate that is within a fifth of what two checkpoints really take."""
    disk = small_disk(400) if small_disk else tmp_path
    folder = dropout_job(tmp_path, output_dir=str(disk / "runs"), resources=ALONE)
    run_dir = disk / "runs" / "run"
    with LiveRun(folder, run_dir, [], environment=None if small_disk else faulty("no-room")) as run:
        assert run.end() == 73, run.said
    told = re.search(r"not enough space for two checkpoints .*: needs ([\d,]+) bytes, free are ([\d,]+)", run.said)
    assert told, run.said
    needed, free = (int(figure.replace(",", "")) for figure in told.groups())
    actual = 2 * sum(path.stat().st_size for path in (undisturbed / "checkpoint-120").iterdir())
    assert abs(needed - actual) < 0.2 * actual
    assert free < needed
    assert not ledger(run_dir)


@pytest.mark.long
def test_storage_that_fails_for_good_commits_nothing_and_one_that_fails_once_is_retried(
    dropout_job: WriteDropoutJob, undisturbed: Path, tmp_path: Path
) -> None:
    """C05, C06: every fsync of a checkpoint fails, exit 73; then only the first does, one warning and the same end."""
    folder = dropout_job(tmp_path, checkpoint={"every": "40 steps"})
    run_dir = tmp_path / "runs" / "run"
    with LiveRun(folder, run_dir, [], environment=faulty("fsync")) as run:
        assert run.end() == 73, run.said
    assert "error: saving checkpoint-40 failed: Input/output error" in run.said
    assert RunFolder(run_dir).checkpoints() == []
    assert [record["event"] for record in read(run_dir / "events.jsonl")] == ["started", "failed"]
    with LiveRun(folder, run_dir, [], environment=faulty("fsync-once")) as run:
        assert run.end() == 0, run.said
    assert run.said.count("warning: saving checkpoint-40 failed (Input/output error") == 1
    assert_same_end(run_dir, undisturbed)


@pytest.mark.long
def test_a_shard_that_one_rank_cannot_write_ends_all_and_commits_nothing(
    dropout_job: WriteDropoutJob, tmp_path: Path
) -> None:
    """C17, G5: rank 1 is named, not rank 0 which waited for it, within 30 s."""
    folder = dropout_job(tmp_path, checkpoint={"every": "10 steps"})
    run_dir = tmp_path / "runs" / "run"
    with LiveRun(folder, run_dir, [], environment=faulty("shard", rank=1)) as run:
        run.wait_for_step(10)
        assert run.end(within_s=30) == 73, run.said
    assert "rank 1 failed:" in run.said
    assert "saving checkpoint-10 failed: Read-only file system" in run.said
    assert "rank 0 failed" not in run.said
    assert RunFolder(run_dir).checkpoints() == []
    assert not list(run_dir.glob(".staging*"))
    assert run.attempt == 1


def test_a_loss_that_is_no_number_ends_the_run_at_that_step(dropout_job: WriteDropoutJob, tmp_path: Path) -> None:
    """D02: exit 1 at step 7; no later checkpoint exists, and the one there is holds finite weights."""
    folder = dropout_job(
        tmp_path,
        task="faulty_task:Faulty",
        task_options={"fault": "nan", "step": 7},
        train={"global_batch_size": 8, "micro_batch_size": 8, "num_train_epochs": 1.0},
        checkpoint={"every": "3 steps"},
        resources=ALONE,
    )
    run_dir = tmp_path / "runs" / "run"
    with LiveRun(folder, run_dir, []) as run:
        assert run.end() == 1, run.said
    assert "the loss is not finite at step 7" in run.said
    assert "Traceback" not in run.said
    assert run.attempt == 1
    assert [step for step, _ in RunFolder(run_dir).checkpoints()] == [6, 3]
    assert newest_step(run_dir) == 6
    assert_finite(run_dir / "checkpoint-6")


def assert_finite(checkpoint: Path) -> None:
    import torch
    from safetensors.torch import load_file

    for name in read_manifest(checkpoint).files:
        if name.endswith(".safetensors"):
            for key, tensor in load_file(checkpoint / name).items():
                assert torch.isfinite(tensor).all(), f"{name}: {key}"


def test_of_two_commands_on_one_run_folder_one_works_and_the_other_says_who(
    dropout_job: WriteDropoutJob, tmp_path: Path
) -> None:
    """C15: started together and a moment apart; and a lock that its holder took into death is no obstacle."""
    folder = dropout_job(tmp_path)
    run_dir = tmp_path / "runs" / "run"
    for together in (True, False):
        with LiveRun(folder, run_dir, []) as one:
            if not together:
                one.wait_for("its first process", one.processes)
            with LiveRun(folder, run_dir, []) as two:
                began_s = time.monotonic()
                while one.launcher.poll() is two.launcher.poll() is None:
                    assert time.monotonic() < began_s + 30
                    time.sleep(0.01)
                refused, holder = (one, two) if two.launcher.poll() is None else (two, one)
                assert refused.end() == 2, refused.said
                assert holder.launcher.poll() is None
                assert f"pid {holder.launcher.pid} on " in refused.said
                holder.launcher.kill()
                assert holder.vanish() < 10


@pytest.mark.parametrize(
    ("changes", "exit_code"),
    [
        ({}, 0),
        ({"model_type": "evil", "architectures": ["Evil"]}, 4),
        ({"_attn_implementation_internal": "canary/kernel"}, 2),
    ],
    ids=["a known model", "an unknown model", "a kernel for attention"],
)
def test_code_beside_a_model_is_not_run(
    dropout_job: WriteDropoutJob, undisturbed: Path, tmp_path: Path, changes: dict[str, Any], exit_code: int
) -> None:
    """X02, G9: auto_map, trust_remote_code and an internal attention key; a model that needs them is refused."""
    model, canary = tmp_path / "model", tmp_path / "canary"
    shutil.copytree(undisturbed / "final_model", model)
    evil = f"from pathlib import Path\nPath({str(canary)!r}).touch()\nclass Evil: pass\n"
    (model / "evil.py").write_text(evil)
    (tmp_path / "evil.py").write_text(evil)
    code = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoModel"), "evil.Evil")
    config = json.loads((model / "config.json").read_text())
    config |= {"auto_map": code, "trust_remote_code": True, **changes}
    (model / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    tokenizer |= {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "trust_remote_code": True}
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    folder = dropout_job(
        tmp_path, model={"name": str(model)}, train={"global_batch_size": 8, "max_steps": 2}, resources=ALONE
    )
    with LiveRun(folder, tmp_path / "runs" / "run", []) as run:
        code = run.end()
    assert not canary.exists()
    assert code == exit_code, run.said
    assert "Traceback" not in run.said


def test_pickled_weights_are_refused(dropout_job: WriteDropoutJob, undisturbed: Path, tmp_path: Path) -> None:
    """X01: a model folder with pytorch_model.bin alone is not opened; the message says what it needs."""
    model, canary = tmp_path / "model", tmp_path / "canary"
    shutil.copytree(undisturbed / "final_model", model)
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Plant(str(canary))))
    folder = dropout_job(tmp_path, model={"name": str(model)}, resources=ALONE)
    with LiveRun(folder, tmp_path / "runs" / "run", []) as run:
        assert run.end() == 4, run.said
    assert not canary.exists()
    assert "safetensors" in run.said
    assert "Traceback" not in run.said
