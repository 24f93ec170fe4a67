"""sha256 of large files, each read once."""

from __future__ import annotations

import hashlib
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from trainwright.errors import UserError
from trainwright.runs import file_hashes
from trainwright.runs.file_hashes import file_digests


@pytest.fixture(autouse=True)
def _kept_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(file_hashes, "SETTLED_S", -1.0)  # files of a test are new


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_rewritten_in_place_with_its_old_time_is_read_again(tmp_path: Path) -> None:
    """Same path, size, inode and time of last write; the kernel's own time of change tells."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"a" * 5000)
    before, first = weights.stat(), file_digests([weights])[weights]
    with weights.open("r+b") as file:
        file.write(b"b")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = weights.stat()
    same = ("st_size", "st_ino", "st_mtime_ns")
    assert [getattr(before, name) for name in same] == [getattr(after, name) for name in same]
    second = file_digests([weights])[weights]
    assert (first.size_bytes, second.size_bytes) == (5000, 5000)
    assert second.sha256 == sha256(weights) != first.sha256


def test_an_unchanged_file_is_not_read_again(tmp_path: Path) -> None:
    """What is kept is believed: with another hash in it, that one is returned."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"a" * 5000)
    true = file_digests([weights])[weights].sha256
    kept = tmp_path / "data" / "trainwright" / "file_hashes.json"
    kept.write_text(kept.read_text().replace(true, "f" * 64))
    assert file_digests([weights])[weights].sha256 == "f" * 64
    kept.write_text("[]")
    assert file_digests([weights])[weights].sha256 == true
    kept.write_text('{"a": 1, "b": {"looks": "x"}, "c"')
    assert file_digests([weights])[weights].sha256 == true


def test_a_file_written_just_now_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could change once more within what the file system's clock can tell apart."""
    monkeypatch.setattr(file_hashes, "SETTLED_S", 60.0)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"a")
    file_digests([weights])
    assert not (tmp_path / "data").exists()


def test_many_files_are_hashed_and_one_that_is_missing_is_named(tmp_path: Path) -> None:
    files = [tmp_path / f"model-{number:05}-of-00009.safetensors" for number in range(9)]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]) * 100_000)
    assert {path: found.sha256 for path, found in file_digests(files).items()} == {path: sha256(path) for path in files}
    files[4].unlink()
    with pytest.raises(UserError, match=r"model-00004-of-00009\.safetensors cannot be read"):
        file_digests(files)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """A sparse file of 2 GiB, in a process that may not have 400 MiB."""
    with (tmp_path / "large.safetensors").open("wb") as file:
        file.truncate(2 << 30)
    code = (
        "import sys; from pathlib import Path; from trainwright.runs.file_hashes import file_digests; "
        "print(file_digests([Path(sys.argv[1])]))"
    )

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (400 << 20, 400 << 20))

    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "large.safetensors"],
        capture_output=True,
        text=True,
        preexec_fn=limited,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "size_bytes=2147483648" in done.stdout
