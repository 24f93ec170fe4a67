from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_saves import Strace
from saving_run import content, save

from trainwright.runs import RunFolder, RunLock
from trainwright.runs.checkpoints import CorruptCheckpoint, newest_valid, retain, verify

# All that changes names or makes them durable; `?` as not every kernel has both spellings of each.
SYSCALLS = (
    "?fsync,?fdatasync,?rename,?renameat,?renameat2,?link,?linkat,?symlink,?symlinkat,"
    "?unlink,?unlinkat,?rmdir,?mkdir,?mkdirat"
)
KEEP, BEST = 2, 10


def empty(path: Path) -> None:
    """A run that never started."""


def resumed(path: Path) -> None:
    """A run that was killed: 10 is whole and the best, 20 is damaged, 30 was being staged."""
    folder = RunFolder(path)
    folder.create()
    attempt = folder.start_attempt()
    save(folder, 10, attempt)
    save(folder, 20, attempt)
    (folder.checkpoint_dir(20) / "model.safetensors").write_bytes(b"half")
    folder.staging_dir(30, attempt).mkdir()
    (folder.staging_dir(30, attempt) / "model.safetensors").write_bytes(b"half")


@pytest.mark.parametrize(
    ("before", "steps"),
    [(empty, (10, 20, 30, 40, 45)), (resumed, (20, 30, 40, 45))],
    ids=["first start", "after a kill"],
)
def test_every_crash_point_leaves_a_valid_checkpoint(
    strace: Strace, tmp_path: Path, before: Callable[[Path], None], steps: tuple[int, ...]
) -> None:
    """C02, C03, G1, G2, G7: SIGKILL on entering each call that changes names, in start, commit, retention and sweep."""
    original = tmp_path / "original"
    before(original)
    known = {path.name for path in original.glob("checkpoint-*")}
    arguments = ("save", KEEP, BEST, *steps)

    rehearsal = _copy(original, tmp_path / "rehearsal")
    counts = strace.count(SYSCALLS, rehearsal, *arguments)
    points = [(syscall, when) for syscall, count in counts.items() for when in range(1, count + 1)]
    assert {"fsync", "mkdir"} < set(counts) and any("rename" in name for name in counts), counts
    assert len(points) > 70, counts

    for number, (syscall, when) in enumerate(points):
        run = _copy(original, tmp_path / f"run_{number}")
        killed = strace.run(syscall, f"signal=KILL:when={when}", run, *arguments)
        at = f"killed at {syscall} number {when} of {counts[syscall]}: {run}"
        assert killed.returncode != 0, at
        said = killed.stdout.splitlines()
        committed = [int(line.split()[1]) for line in said if line.startswith("committed")]
        _check_after_crash(RunFolder(run), committed, known, steps, at)
        shutil.rmtree(run)


def test_everything_is_durable_before_it_gets_its_name(strace: Strace, tmp_path: Path) -> None:
    """C02: a kill cannot show it, a power cut would: files and folders first, then the rename, then its parent."""
    run = tmp_path / "run"
    strace.count("?fsync,?rename,?renameat,?renameat2", run, "save", KEEP, BEST, 10)
    calls = strace.log.read_text().splitlines()
    (rename,) = [number for number, call in enumerate(calls) if "rename" in call and ".staging-checkpoint-10" in call]
    synced_before = re.findall(r"fsync\(\d+<(.+)>\)", "\n".join(calls[:rename]))
    staging = str(RunFolder(run).staging_dir(10, 1))
    members = [path.relative_to(run / "checkpoint-10") for path in (run / "checkpoint-10").rglob("*")]
    assert len(members) == 4
    assert {staging, *(f"{staging}/{member}" for member in members)} <= set(synced_before)
    assert synced_before[-1] == staging, "a folder is synced after what is in it"
    assert re.search(rf"fsync\(\d+<{re.escape(str(run))}>\)", calls[rename + 1]), calls[rename + 1]


def _check_after_crash(
    folder: RunFolder, committed: list[int], known: set[str], steps: tuple[int, ...], at: str
) -> None:
    folder.create()
    due = next((step for step in steps if step not in committed), steps[-1])
    old = committed[-1] if committed else (BEST if known else None)
    path, manifest, _ = newest_valid(folder)
    found = None if manifest is None else manifest.step
    assert found in (old, due), f"{found} instead of {old} or {due}, {at}"
    assert found is None or path == folder.checkpoint_dir(found), at
    valid = []
    for step, checkpoint in folder.checkpoints():
        try:
            verify(checkpoint, folder.run_id)
        except CorruptCheckpoint as error:
            assert step == 20 and checkpoint.name in known and "model.safetensors" in error.reason, (
                f"{checkpoint}, {at}"
            )
        else:
            valid.append(step)
            for name, data in content(step).items():
                assert (checkpoint / name).read_bytes() == data, at
    if found is not None:
        assert BEST in valid or found == BEST, f"the best is lost, {at}"
        assert len(valid) >= min(KEEP, len(committed)), f"only {valid} are left, {at}"

    with RunLock(folder):
        attempt = folder.start_attempt()
        hidden = [entry.name for entry in folder.path.iterdir() if entry.name.startswith(".")]
        assert hidden == [], f"not swept: {hidden}, {at}"
        path, manifest, _ = newest_valid(folder)
        assert (None if manifest is None else manifest.step) == found, f"the next start lost a checkpoint, {at}"
        save(folder, 50, attempt)
        retain(folder, KEEP, BEST if BEST in valid else None)
        _, manifest, skipped = newest_valid(folder)
        assert manifest is not None and manifest.step == 50 and manifest.attempt == attempt, at
        assert skipped == [], f"{skipped}, {at}"


def _copy(original: Path, copy: Path) -> Path:
    if original.exists():
        shutil.copytree(original, copy, symlinks=True)
    return copy
