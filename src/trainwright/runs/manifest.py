"""The manifest of a checkpoint: what belongs to it, with size and sha256 of every file, and the check of all of it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

from trainwright.runs.writing import plain

MANIFEST_NAME = "manifest.json"
SCHEMA_VERSION = 1
RUN_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
_LARGEST_MANIFEST_BYTES = 16 * 2**20
# No run gets there; larger numbers can only come from damage or from malice.
_LARGEST_NUMBER = 10**18


class CorruptCheckpoint(Exception):  # noqa: N818 - it is a checkpoint that is corrupt, found in a normal resume
    """A checkpoint that must not be loaded; `reason` names the file and what is wrong with it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class FileDigest:
    """Size and sha256 (hex) of one file."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a committed checkpoint says of itself; `files` maps paths inside it (with `/`) to their digests."""

    run_id: str
    step: int
    attempt: int
    files: dict[str, FileDigest]
    contract: dict[str, Any]
    state: dict[str, Any]
    created_at: str

    def to_bytes(self) -> bytes:
        """Return the text of manifest.json, which carries its own sha256 so that no bit of it can flip unseen."""
        content = {
            "schema_version": SCHEMA_VERSION,
            "run_id": self.run_id,
            "step": self.step,
            "attempt": self.attempt,
            "created_at": self.created_at,
            "contract": self.contract,
            "state": self.state,
            "files": {
                name: {"size_bytes": digest.size_bytes, "sha256": digest.sha256}
                for name, digest in sorted(self.files.items())
            },
        }
        return _with_own_digest(content)


def seal_file(path: Path) -> FileDigest:
    """Make a file's content durable and return its size and sha256.

    After an OSError write the file anew: the kernel may have dropped what it could not write, and call the next fsync
    of the same file a success (PostgreSQL wiki, "Fsync Errors").
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        os.fsync(fd)
        return FileDigest(os.fstat(fd).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def read_manifest(checkpoint: Path) -> Manifest:
    """Return a checkpoint's manifest, checked itself but not the files it lists; raises CorruptCheckpoint."""
    try:
        with _open_regular(checkpoint, MANIFEST_NAME, _LARGEST_MANIFEST_BYTES) as file:
            raw = file.read(_LARGEST_MANIFEST_BYTES)
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"{MANIFEST_NAME} is missing, so it was never committed") from error
    except OSError as error:
        raise CorruptCheckpoint(f"{MANIFEST_NAME} cannot be read: {error.strerror}") from error
    try:
        content = json.loads(raw)
        stated = content.pop("sha256")
        whole = isinstance(stated, str) and _with_own_digest(content) == raw
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise CorruptCheckpoint(f"{MANIFEST_NAME} is torn or not a manifest") from error
    if not whole:
        raise CorruptCheckpoint(f"{MANIFEST_NAME} does not match its own sha256")
    return _parse(content)


def verify(path: Path, run_id: str | None = None) -> Manifest:
    """Return the manifest after checking size and sha256 of every file it lists; raises CorruptCheckpoint.

    With `run_id` a checkpoint of another run is refused too. Nothing outside the folder is read: paths that lead out
    of it, symbolic links and special files are refused. Files that the manifest does not list are not part of the
    checkpoint and must not be loaded.
    """
    manifest = read_manifest(path)
    if run_id is not None and manifest.run_id != run_id:
        raise CorruptCheckpoint(f"it belongs to another run ({manifest.run_id}, not {run_id})")
    if path.name.startswith("checkpoint-") and path.name != f"checkpoint-{manifest.step}":
        raise CorruptCheckpoint(f"{MANIFEST_NAME} is of step {manifest.step}")
    for name, digest in manifest.files.items():
        _check_file(path, name, digest)
    return manifest


def check_member_name(name: str) -> None:
    """Raise CorruptCheckpoint unless `name` is a printable path that can only lie inside the checkpoint's folder."""
    path = PurePosixPath(name)
    if not name.isprintable() or name in ("", ".") or path.is_absolute() or ".." in path.parts or str(path) != name:
        raise CorruptCheckpoint(f"{MANIFEST_NAME} lists {name!a}, which is not a path inside the checkpoint")


def _with_own_digest(content: Mapping[str, Any]) -> bytes:
    body = json.dumps(plain(content), indent=1, sort_keys=True, allow_nan=False)
    sealed = {**content, "sha256": hashlib.sha256(body.encode()).hexdigest()}
    return (json.dumps(plain(sealed), indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _parse(content: dict[str, Any]) -> Manifest:
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise CorruptCheckpoint(f"{MANIFEST_NAME} has schema_version {version!a}, not {SCHEMA_VERSION}")
    run_id, created_at, files = content.get("run_id"), content.get("created_at"), content.get("files")
    if not isinstance(run_id, str) or not RUN_ID.fullmatch(run_id):
        raise CorruptCheckpoint(f"{MANIFEST_NAME} has no usable `run_id`")
    for key in ("step", "attempt"):
        if not _is_count(content.get(key)):
            raise CorruptCheckpoint(f"{MANIFEST_NAME} has no usable `{key}`")
    for key in ("contract", "state", "files"):
        if not isinstance(content.get(key), dict):
            raise CorruptCheckpoint(f"{MANIFEST_NAME} has no usable `{key}`")
    assert isinstance(files, dict)
    if not files:
        raise CorruptCheckpoint(f"{MANIFEST_NAME} lists no file, so there is nothing to go on from")
    return Manifest(
        run_id=run_id,
        step=content["step"],
        attempt=content["attempt"],
        files={name: _parse_digest(name, digest) for name, digest in files.items()},
        contract=content["contract"],
        state=content["state"],
        created_at=str(created_at),
    )


def _parse_digest(name: str, digest: object) -> FileDigest:
    check_member_name(name)
    size_bytes = digest.get("size_bytes") if isinstance(digest, dict) else None
    sha256 = digest.get("sha256") if isinstance(digest, dict) else None
    if not _is_count(size_bytes) or not isinstance(sha256, str):
        raise CorruptCheckpoint(f"{MANIFEST_NAME} has no usable size and sha256 for {name}")
    return FileDigest(size_bytes, sha256)


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _LARGEST_NUMBER


def _check_file(checkpoint: Path, name: str, digest: FileDigest) -> None:
    try:
        with _open_regular(checkpoint, name, _LARGEST_NUMBER) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes != digest.size_bytes:
                raise CorruptCheckpoint(f"{name} has {size_bytes} bytes, not the {digest.size_bytes} that were written")
            if hashlib.file_digest(file, "sha256").hexdigest() != digest.sha256:
                raise CorruptCheckpoint(f"{name} does not have the sha256 that was written")
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"{name} is missing") from error
    except OSError as error:
        raise CorruptCheckpoint(f"{name} cannot be read: {error.strerror}") from error


def _open_regular(checkpoint: Path, name: str, largest_bytes: int) -> io.BufferedReader:
    """Open a regular file: no part of its path from the checkpoint on may be a link, and no pipe can block."""
    path = PurePosixPath(name)
    for part in (path, *path.parents):
        if (checkpoint / part).is_symlink():
            raise CorruptCheckpoint(f"{name} is or lies behind a symbolic link")
    fd = os.open(checkpoint / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size > largest_bytes:
        os.close(fd)
        raise CorruptCheckpoint(f"{name} is not a regular file of at most {largest_bytes} bytes")
    return os.fdopen(fd, "rb")
