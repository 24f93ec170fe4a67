from __future__ import annotations

import datetime
import os
import random
import shutil

import pytest
from saving_run import save

from trainwright.runs import RunFolder
from trainwright.runs import commit as committing
from trainwright.runs.checkpoints import newest_valid, retain, sweep, verify


def steps(folder: RunFolder) -> list[int]:
    return sorted(step for step, _ in folder.checkpoints())


def newest_step(folder: RunFolder) -> int | None:
    _, manifest, _ = newest_valid(folder)
    return None if manifest is None else manifest.step


def test_the_newest_and_the_best_stay(folder: RunFolder) -> None:
    """C03: what is deleted is said, and every one that stays is whole."""
    attempt = folder.start_attempt()
    for step in (9, 10, 100, 20, 30):
        save(folder, step, attempt)
    assert retain(folder, 2, best_step=10) == [9, 20]
    assert steps(folder) == [10, 30, 100]
    assert retain(folder, 2, best_step=10) == []
    assert retain(folder, 1, best_step=None) == [10, 30]
    verify(folder.checkpoint_dir(100), folder.run_id)
    assert not list(folder.path.glob(".trash*"))


def test_clocks_and_mtimes_do_not_matter(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """C14: over 20 saves the clock jumps by up to a year, and every mtime is a random one."""
    clock = random.Random(14)

    class JumpingClock(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return datetime.datetime(2026, 1, 1, tzinfo=tz) + datetime.timedelta(hours=clock.uniform(-1, 8760))

    monkeypatch.setattr(committing.datetime, "datetime", JumpingClock)
    attempt = folder.start_attempt()
    for step in range(1, 21):
        path = save(folder, step, attempt)
        for entry in [path, *path.rglob("*"), *(other for _, other in folder.checkpoints())]:
            moment = clock.uniform(0, 4e9)
            os.utime(entry, (moment, moment))
        retain(folder, 2, best_step=3)
        assert steps(folder) == sorted({max(1, step - 1), step} | ({3} if step >= 3 else set()))
        assert newest_step(folder) == step


def test_what_is_not_provably_ours_is_never_deleted(folder: RunFolder, tmp_path: object) -> None:
    """C13, T: strangers, damaged manifests and other files stay, however old they look."""
    attempt = folder.start_attempt()
    other = RunFolder(folder.path.parent / "other")
    other.create()
    shutil.copytree(save(other, 1, other.start_attempt()), folder.checkpoint_dir(1))
    save(folder, 2, attempt)
    (folder.checkpoint_dir(2) / "manifest.json").write_bytes(b"torn")
    (folder.path / "checkpoint-best").mkdir()
    for step in (3, 4, 5):
        save(folder, step, attempt)
    assert retain(folder, 1, None) == [3, 4]
    assert steps(folder) == [1, 2, 5]
    assert (folder.path / "checkpoint-best").is_dir()


def test_a_damaged_later_checkpoint_does_not_push_out_the_only_whole_one(folder: RunFolder) -> None:
    """G1: after a fall-back the run writes smaller steps than the damaged one; those are its newest."""
    first = folder.start_attempt()
    save(folder, 40, first)
    save(folder, 80, first)
    (folder.checkpoint_dir(80) / "model.safetensors").unlink()
    assert newest_step(folder) == 40

    second = folder.start_attempt()
    save(folder, 60, second)
    assert retain(folder, 1, None) == [40, 80]
    assert newest_step(folder) == 60
    save(folder, 80, second)
    retain(folder, 1, None)
    assert newest_step(folder) == 80


def test_an_attempt_that_went_back_on_purpose_is_the_one_that_goes_on(folder: RunFolder) -> None:
    """G1: `--resume checkpoint-40` while 80 is whole: after a crash the run goes on from 60, not from the old 80."""
    first = folder.start_attempt()
    for step in (40, 80):
        save(folder, step, first)
    save(folder, 60, folder.start_attempt())
    assert newest_step(folder) == 60


def test_attempts_are_counted_on_when_fence_and_logs_are_gone(folder: RunFolder) -> None:
    """G1: otherwise new checkpoints would look older than old ones."""
    for step in (10, 20):
        save(folder, step, folder.start_attempt())
    shutil.rmtree(folder.logs_dir)
    folder.fence_json.unlink()
    attempt = folder.start_attempt()
    assert attempt == 3
    save(folder, 30, attempt)
    assert retain(folder, 1, None) == [10, 20]
    assert newest_step(folder) == 30


def test_sweep_takes_leftovers_and_nothing_else(folder: RunFolder) -> None:
    """C03, G7: and it names what it took; a link in the trash loses the link, not what it points to."""
    old = folder.start_attempt()
    attempt = folder.start_attempt()
    save(folder, 10, attempt)
    folder.staging_dir(20, old).mkdir()
    folder.staging_dir(20, attempt).mkdir()
    precious = folder.path.parent / "precious"
    precious.mkdir()
    (precious / "data").write_text("x")
    (folder.path / ".trash-link").symlink_to(precious)
    (folder.path / ".trash-checkpoint-5-00").mkdir()
    taken = sweep(folder)
    assert len(taken) == 3 and {".trash-link", ".trash-checkpoint-5-00"} < set(taken)
    assert sorted(path.name for path in folder.path.glob(".*")) == [folder.staging_dir(20, attempt).name]
    assert (precious / "data").read_text() == "x"
    assert newest_step(folder) == 10


def test_what_the_last_attempt_staged_goes_once_it_has_ended(folder: RunFolder) -> None:
    """G7: the launcher says so after its ranks are gone; an attempt that is not the latest any more says nothing."""
    old = folder.start_attempt()
    attempt = folder.start_attempt()
    staging = folder.staging_dir(20, attempt)
    staging.mkdir()
    assert folder.sweep() == []
    assert folder.sweep(ended=old) == []
    assert staging.is_dir()
    assert len(folder.sweep(ended=attempt)) == 1
    assert not staging.exists()
