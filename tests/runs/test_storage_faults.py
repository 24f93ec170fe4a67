from __future__ import annotations

import contextlib
import errno
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_saves import SmallDisk, Strace
from saving_run import save

from trainwright.errors import ExitCode, UserError
from trainwright.runs import RunFolder, free_bytes, require_free_space, retry_storage, storage
from trainwright.runs.checkpoints import discard_staging, newest_valid, verify

KIB = 1024


@pytest.fixture
def waits_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between tries, recorded instead of waited."""
    waits: list[float] = []
    monkeypatch.setattr(storage.time, "sleep", waits.append)
    return waits


def saved_once(path: Path) -> tuple[RunFolder, int]:
    folder = RunFolder(path)
    folder.create()
    attempt = folder.start_attempt()
    save(folder, 10, attempt)
    return folder, attempt


def newest_step(folder: RunFolder) -> int:
    _, manifest, _ = newest_valid(folder)
    assert manifest is not None
    return manifest.step


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.99])
def test_a_full_disk_ends_in_exit_73_and_keeps_the_last_checkpoint(
    tmp_path: Path,
    small_disk: Callable[[int], SmallDisk] | None,
    waits_s: list[float],
    fraction: float,
) -> None:
    """C04: no room at the start, in the middle and at the last byte of a save."""
    weights = bytes(512 * KIB)
    needed = len(weights)
    disk = small_disk(128 + int(512 * fraction)) if small_disk else None
    folder, attempt = saved_once((disk.path if disk else tmp_path) / "run")
    if disk:
        # So that exactly the fraction of the save fits.
        (disk.path / "ballast").write_bytes(bytes(max(0, free_bytes(disk.path) - int(needed * fraction))))

    def try_to_save() -> Path:
        return retry_storage(
            lambda: save(folder, 20, attempt, {"model.safetensors": weights}),
            "saving checkpoint-20",
            path=folder.path,
            needed_bytes=needed,
            clean_up=lambda: discard_staging(folder, 20, attempt),
        )

    # Without a disk of its own, the limit on the size of a file is what cuts the write short.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if disk is None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(needed * fraction), before[1]))
    try:
        with pytest.raises(UserError) as caught:
            try_to_save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert caught.value.exit_code == ExitCode.STORAGE == 73
    for figure in (str(folder.path), f"{needed:,} bytes", "free were"):
        assert figure in caught.value.message
    assert sum(waits_s) <= 10
    assert len(waits_s) == (2 if disk else 0)
    assert newest_step(folder) == 10
    assert not list(folder.path.glob(".staging*"))

    if disk:
        (disk.path / "ballast").unlink()
        disk.remount("size=2048k")
    verify(try_to_save(), folder.run_id)
    assert newest_step(folder) == 20


def test_a_read_only_disk_is_not_tried_again(
    tmp_path: Path, small_disk: Callable[[int], SmallDisk] | None, waits_s: list[float]
) -> None:
    """C07: what will not change by waiting is reported at once."""
    disk = small_disk(256) if small_disk else None
    folder, attempt = saved_once((disk.path if disk else tmp_path) / "run")
    disk.remount("ro") if disk else folder.path.chmod(0o500)
    try:
        with pytest.raises(UserError) as caught:
            retry_storage(lambda: save(folder, 20, attempt), "saving checkpoint-20", path=folder.path)
    finally:
        disk.remount("rw") if disk else folder.path.chmod(0o700)
    assert caught.value.exit_code == ExitCode.STORAGE
    assert "Read-only" in caught.value.message or "ermission" in caught.value.message
    assert waits_s == []
    assert newest_step(folder) == 10


def test_a_fault_that_passes_is_retried_with_one_warning(strace: Strace, tmp_path: Path) -> None:
    """C05: the first fsync fails once; the run does not end, and the checkpoint is the right one."""
    folder, attempt = saved_once(tmp_path / "run")
    done = strace.run("fsync", "error=EIO:when=1", folder.path, "go-on", attempt, 3, 10, 20)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:1] == ["committed 20"]
    warnings = done.stderr.splitlines()
    assert len(warnings) == 1 and "saving checkpoint-20 failed (Input/output error" in warnings[0], warnings
    verify(folder.checkpoint_dir(20), folder.run_id)


def test_a_log_on_the_same_full_disk_does_not_end_the_tries(
    waits_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C04: the warning cannot be written either; the second try is made all the same."""
    tries = iter([OSError(errno.ENOSPC, "No space left on device"), None])

    def write() -> str:
        if (error := next(tries)) is not None:
            raise error
        return "written"

    # What the buffer holds can never be written, so closing it fails too.
    with contextlib.suppress(OSError), Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stderr", full)
        assert retry_storage(write, "saving checkpoint-20", path=Path.cwd()) == "written"
    assert next(tries, "both tries were made") == "both tries were made"
    assert len(waits_s) == 1


def test_a_fault_that_stays_is_reported_within_ten_seconds(strace: Strace, tmp_path: Path) -> None:
    """C06, G6: every fsync fails, with the real waits between the tries."""
    folder, attempt = saved_once(tmp_path / "run")
    started_s = time.monotonic()
    done = strace.run("fsync", "error=EIO:when=1+", folder.path, "go-on", attempt, 3, 10, 20)
    assert time.monotonic() - started_s < 10
    assert done.returncode == 73, done.stderr
    assert "error: saving checkpoint-20 failed: Input/output error" in done.stderr
    assert "committed" not in done.stdout
    assert newest_step(folder) == 10
    assert not list(folder.path.glob(".staging*"))


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_no_commit_is_reported_whichever_sync_or_rename_fails(
    tmp_path: Path, waits_s: list[float], monkeypatch: pytest.MonkeyPatch, strace: Strace, error: str
) -> None:
    """C06: from each fsync or rename on everything fails; never a false commit, never a half checkpoint in sight."""
    rehearsal, attempt = saved_once(tmp_path / "rehearsal")
    counts = strace.count("?fsync,?rename,?renameat,?renameat2", rehearsal.path, "go-on", attempt, 3, 10, 20)
    saving_calls = [(name, when) for name, count in counts.items() for when in range(1, count + 1)]
    assert len(saving_calls) >= 7, counts
    monkeypatch.setenv("SAVING_RUN_WAITS", "none")
    for name, when in saving_calls:
        folder, attempt = saved_once(tmp_path / f"{name}_{when}")
        done = strace.run(name, f"error={error}:when={when}+", folder.path, "go-on", attempt, 3, 10, 20)
        at = f"{error} from {name} {when} on: {done.stdout} {done.stderr}"
        assert done.returncode == 73, at
        assert "committed" not in done.stdout, at
        assert newest_step(folder) in (10, 20), at
        assert not list(folder.path.glob(".staging*")), at
        for _, checkpoint in folder.checkpoints():
            verify(checkpoint, folder.run_id)


def test_an_error_that_is_not_the_storages_goes_through_at_once(waits_s: list[float], tmp_path: Path) -> None:
    """C05: a bug is not retried and not renamed."""
    for error in (RuntimeError("shapes do not match"), ConnectionResetError(104, "reset"), ValueError("x")):

        def fail(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            retry_storage(fail, "saving", path=tmp_path)
        assert caught.value is error
    assert waits_s == []


@pytest.mark.parametrize(
    "text",
    [
        "[enforce fail at inline_container.cc:672] . unexpected pos 52576128 vs 52576020",
        "Error while serializing: I/O error: No space left on device (os error 28)",
    ],
)
def test_a_full_disk_is_known_in_the_words_of_the_libraries(waits_s: list[float], tmp_path: Path, text: str) -> None:
    """C04: torch and safetensors raise errors of their own when the disk is full."""

    def fail() -> None:
        raise RuntimeError(text)

    with pytest.raises(UserError, match="No space left on device") as caught:
        retry_storage(fail, "saving checkpoint-20", path=tmp_path, needed_bytes=1234567)
    assert caught.value.exit_code == ExitCode.STORAGE
    assert "1,234,567 bytes" in caught.value.message


def test_too_little_space_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """C08: the figures are in the message, also for a folder that does not exist yet."""
    target = tmp_path / "not" / "there" / "yet"
    free = free_bytes(target)
    require_free_space(target, free // 2, "two checkpoints")
    needed = free_bytes(target) + 2**40
    with pytest.raises(UserError) as caught:
        require_free_space(target, needed, "two checkpoints")
    assert caught.value.exit_code == ExitCode.STORAGE
    assert f"{needed:,}" in caught.value.message and "two checkpoints" in caught.value.message
    assert not target.exists()
