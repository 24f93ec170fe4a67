from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from saving_run import content, save

from trainwright.errors import ExitCode, UserError
from trainwright.runs import RunFolder
from trainwright.runs import commit as committing
from trainwright.runs.checkpoints import commit, newest_valid, open_staging, seal_file, verify


def stage(folder: RunFolder, step: int, attempt: int) -> dict[str, object]:
    staging = open_staging(folder, step, attempt)
    (staging / "model.safetensors").write_bytes(b"weights")
    return {"model.safetensors": seal_file(staging / "model.safetensors")}


def test_each_start_has_its_own_number_and_log_folder(folder: RunFolder) -> None:
    """C15: `latest` follows, and the fence is held by the last start alone."""
    assert [folder.start_attempt() for _ in range(3)] == [1, 2, 3]
    assert [folder.holds_fence(attempt) for attempt in (1, 2, 3)] == [False, False, True]
    assert folder.rank_log(2, 1) == folder.logs_dir / "attempt_2" / "rank_1.log"
    assert folder.attempt_dir(2).is_dir()
    assert (folder.logs_dir / "latest").resolve() == folder.attempt_dir(3)


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"attempt": "2"}', b'{"attempt": true}', b"\xff"])
def test_a_damaged_fence_shuts_everybody_out_and_the_next_start_mends_it(folder: RunFolder, garbage: bytes) -> None:
    """G2: no number is used twice."""
    folder.start_attempt()
    folder.start_attempt()
    folder.fence_json.write_bytes(garbage)
    assert not folder.holds_fence(2)
    assert folder.start_attempt() == 3
    assert folder.holds_fence(3)


def test_a_former_attempt_can_neither_stage_nor_commit(folder: RunFolder) -> None:
    """C15: what it staged is gone, and it is told why."""
    old = folder.start_attempt()
    digests = stage(folder, 10, old)
    new = folder.start_attempt()
    assert not folder.staging_dir(10, old).exists()
    for act in (
        lambda: open_staging(folder, 20, old),
        lambda: commit(folder, 10, old, digests, contract={}, state={}),
    ):
        with pytest.raises(UserError, match=rf"another attempt \({new}\) took over") as caught:
            act()
        assert caught.value.exit_code == ExitCode.FAILED
    assert newest_valid(folder)[0] is None
    verify(save(folder, 10, new), folder.run_id)


def test_a_former_attempt_that_slept_at_the_worst_moment_destroys_nothing(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C15: it passed the last look at the fence, then a new attempt started and committed the same step."""
    old = folder.start_attempt()
    digests = stage(folder, 10, old)
    publish = committing._publish

    def sleep_first(staging: Path, final: Path, run_id: str) -> Path:
        monkeypatch.setattr(committing, "_publish", publish)
        save(folder, 10, folder.start_attempt())
        return publish(staging, final, run_id)

    monkeypatch.setattr(committing, "_publish", sleep_first)
    with pytest.raises(UserError, match="took over"):
        commit(folder, 10, old, digests, contract={}, state={})
    path, manifest, skipped = newest_valid(folder)
    assert path == folder.checkpoint_dir(10) and manifest is not None and manifest.attempt == 2 and skipped == []
    assert (path / "model.safetensors").read_bytes() == content(10)["model.safetensors"]


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_commit_that_failed_may_be_repeated(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """C05: wherever the storage failed once, also after the rename."""
    attempt = folder.start_attempt()
    staging = open_staging(folder, 10, attempt)
    (staging / "dcp").mkdir()
    (staging / "dcp" / "part").write_bytes(b"weights")
    digests = {"dcp/part": seal_file(staging / "dcp" / "part")}
    calls = []
    sync_dir = committing.sync_dir

    def fail_once(path: Path) -> None:
        calls.append(path)
        if len(calls) == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        sync_dir(path)

    monkeypatch.setattr(committing, "sync_dir", fail_once)
    with pytest.raises(OSError, match="Input/output"):
        commit(folder, 10, attempt, digests, contract={}, state={})
    path = commit(folder, 10, attempt, digests, contract={}, state={})
    assert verify(path, folder.run_id).attempt == attempt
    assert calls[-1] == folder.path, "the name of the checkpoint was not made durable"


def test_a_missing_shard_is_not_committed(folder: RunFolder) -> None:
    """C17: a rank whose disk is not the shared one left nothing here; its file is named."""
    attempt = folder.start_attempt()
    digests = stage(folder, 10, attempt)
    digests |= {"optimizer/rank_1.bin": seal_file(folder.run_json), "optimizer/rank_2.bin": seal_file(folder.run_json)}
    with pytest.raises(UserError) as caught:
        commit(folder, 10, attempt, digests, contract={}, state={})
    assert caught.value.exit_code == ExitCode.STORAGE
    assert caught.value.problems == ("optimizer/rank_1.bin is missing", "optimizer/rank_2.bin is missing")
    assert newest_valid(folder)[0] is None


def test_a_file_that_changed_after_it_was_sealed_is_not_committed(folder: RunFolder) -> None:
    """C17"""
    attempt = folder.start_attempt()
    digests = stage(folder, 10, attempt)
    (folder.staging_dir(10, attempt) / "model.safetensors").write_bytes(b"half")
    with pytest.raises(UserError) as caught:
        commit(folder, 10, attempt, digests, contract={}, state={})
    assert "model.safetensors has 4 bytes, 7 when it was sealed" in caught.value.problems


def test_a_file_that_nobody_sealed_is_a_bug(folder: RunFolder) -> None:
    """C10: it would have no sha256, so its damage would never be seen."""
    attempt = folder.start_attempt()
    digests = stage(folder, 10, attempt)
    (folder.staging_dir(10, attempt) / "scheduler.bin").write_bytes(b"x")
    with pytest.raises(AssertionError, match=r"scheduler\.bin"):
        commit(folder, 10, attempt, digests, contract={}, state={})
    assert newest_valid(folder)[0] is None


def test_everything_is_for_the_owners_eyes_only(folder: RunFolder) -> None:
    """X05: folders 0700, files 0600, whatever the umask says."""
    before = os.umask(0)
    try:
        attempt = folder.start_attempt()
        save(folder, 10, attempt)
        fresh = RunFolder(folder.path / "nested")
        fresh.create()
    finally:
        os.umask(before)
    for path in (fresh.path, folder.logs_dir, folder.attempt_dir(attempt), folder.checkpoint_dir(10)):
        assert path.stat().st_mode & 0o777 == 0o700, path
    for path in (fresh.run_json, folder.fence_json, folder.checkpoint_dir(10) / "manifest.json"):
        assert path.stat().st_mode & 0o777 == 0o600, path
