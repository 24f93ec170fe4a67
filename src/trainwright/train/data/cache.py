"""The token cache: what a task made of the rows, once, as flat binary files.

    <root>/<key>/  <stream>.bin      int32, the tokens of all documents one after the other
                   <stream>.offsets  int64 (documents + 1,), where each document begins
                   targets           int32 (samples,), target tokens of each sample
                   pack.documents    int64, with packing: the documents of all samples, sample by sample
                   pack.offsets      int64 (samples + 1,), where each sample begins in pack.documents
                   meta.json         written last

A cache is written beside its place and renamed into it, so that it is there whole or not at all; of two processes
that write the same one, the first to finish wins and the other takes the winner's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from trainwright.errors import UserError

FORMAT = 1
_META = "meta.json"
_OWNER = "owner.lock"
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class CacheMeta:
    """What a finished cache holds."""

    format: int
    key: str
    streams: tuple[str, ...]
    samples: int
    """Packs with packing, else documents."""
    documents: int
    tokens: int
    """Sum of the documents' lengths; a document is as long as its longest stream."""
    targets: int
    longest: int
    """Length of the longest sample, in tokens."""
    packed: bool
    content_sha256: str
    """Over all token sequences and their grouping: equal exactly when a model sees the same."""
    sizes: dict[str, int]
    """Bytes of each file."""
    report: dict[str, Any]
    """What became of the rows, as the maker of the cache counted it."""


def cache_path(root: Path, key: str) -> Path:
    """Return the folder of the cache with this key, there or not."""
    return root / key[:32]


def read_meta(path: Path) -> CacheMeta | None:
    """Return what the finished cache at `path` holds; None if there is none, or a file is missing or cut short."""
    try:
        values = json.loads((path / _META).read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            return None
        meta = CacheMeta(**values | {"streams": tuple(values["streams"])})
        if all((path / name).stat().st_size == size for name, size in meta.sizes.items()):
            return meta
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return None


class CacheWriter:
    """Writes one cache; used as a context manager, it leaves nothing behind unless `finish` was reached."""

    def __init__(self, root: Path, key: str, streams: Sequence[str]) -> None:
        self.key = key
        self._root = root
        self._streams = tuple(streams)
        self._lengths = {name: array("q") for name in streams}
        self._targets = array("i")
        self._digests = {name: hashlib.sha256() for name in streams}
        self._files: dict[str, IO[bytes]] = {}

    def __enter__(self) -> CacheWriter:
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _exclusive(self._root):
            _remove_abandoned(self._root)
            self._folder = self._root / f"{_UNFINISHED}{self.key[:16]}-{secrets.token_hex(4)}"
            self._folder.mkdir(mode=0o700)
            self._owner = (self._folder / _OWNER).open("wb")
            fcntl.flock(self._owner, fcntl.LOCK_EX)
        self._files = {name: (self._folder / f"{name}.bin").open("wb", buffering=1 << 20) for name in self._streams}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # a full disk must not hide the error that is on its way
            for file in self._files.values():
                file.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._owner.close()

    @property
    def documents(self) -> int:
        """Number of documents written so far."""
        return len(self._targets)

    def append(self, sample: Mapping[str, Sequence[int]], targets: int) -> None:
        """Write one document: int32 tokens for each stream, and its number of target tokens.

        Raises:
            UserError: the streams are not those of the task, or hold something that is no int32.
        """
        if sample.keys() != self._lengths.keys():
            raise UserError(
                f"the task's encode() made {', '.join(sample) or 'nothing'}, not its streams {', '.join(self._streams)}"
            )
        for name, tokens in sample.items():
            try:
                raw = array("i", tokens).tobytes()
            except (TypeError, OverflowError) as error:
                raise UserError(f"the task's encode() put something else than 32-bit integers into `{name}`") from error
            self._digests[name].update(raw)
            self._files[name].write(raw)
            self._lengths[name].append(len(tokens))
        self._targets.append(targets)

    def lengths(self) -> np.ndarray:
        """Return the length of each document, that of its longest stream, as int64 (documents,)."""
        longest: np.ndarray = np.max([np.frombuffer(each, dtype=np.int64) for each in self._lengths.values()], axis=0)
        return longest

    def finish(self, report: dict[str, Any], packs: tuple[np.ndarray, np.ndarray] | None = None) -> Path:
        """Put the cache into its place and return that; `packs` are the documents of all samples and their offsets.

        A finished cache that another process put there meanwhile stays, and this one is dropped.
        """
        assert self.documents > 0
        digest = hashlib.sha256()
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            offsets = np.concatenate([[0], np.cumsum(np.frombuffer(self._lengths[name], dtype=np.int64))])
            self._write(f"{name}.offsets", offsets.astype(np.int64))
            for part in (name.encode(), self._digests[name].digest(), offsets.astype(np.int64).tobytes()):
                digest.update(part)
        lengths, targets = self.lengths(), np.frombuffer(self._targets, dtype=np.int32)
        tokens, longest = int(lengths.sum()), int(lengths.max())
        if packs is not None:
            documents, offsets = packs
            self._write("pack.documents", documents.astype(np.int64))
            self._write("pack.offsets", offsets.astype(np.int64))
            digest.update(documents.astype(np.int64).tobytes() + offsets.astype(np.int64).tobytes())
            targets = np.add.reduceat(targets[documents], offsets[:-1]).astype(np.int32)
            longest = int(np.add.reduceat(lengths[documents], offsets[:-1]).max())
        self._write("targets", targets)
        digest.update(targets.tobytes())
        meta = CacheMeta(
            format=FORMAT,
            key=self.key,
            streams=self._streams,
            samples=len(targets),
            documents=self.documents,
            tokens=tokens,
            targets=int(targets.sum(dtype=np.int64)),
            longest=longest,
            packed=packs is not None,
            content_sha256=digest.hexdigest(),
            sizes={path.name: path.stat().st_size for path in sorted(self._folder.iterdir()) if path.name != _OWNER},
            report=report,
        )
        (self._folder / _META).write_text(json.dumps(dataclasses.asdict(meta), indent=1) + "\n", encoding="utf-8")
        _sync(self._folder / _META)
        _sync(self._folder)
        return self._put_in_place()

    def _write(self, name: str, values: np.ndarray) -> None:
        with (self._folder / name).open("wb") as file:
            file.write(values.tobytes())
            file.flush()
            os.fsync(file.fileno())

    def _put_in_place(self) -> Path:
        path = cache_path(self._root, self.key)
        with _exclusive(self._root):
            if read_meta(path) is None:
                if path.exists():  # damaged: readers that still have it open keep their files
                    shutil.rmtree(path)
                self._folder.rename(path)
                _sync(self._root)
        return path


@contextlib.contextmanager
def _exclusive(root: Path) -> Iterator[None]:
    with (root / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_abandoned(root: Path) -> None:
    """Remove what killed processes left: a living one holds the lock on its folder's owner file."""
    for folder in root.glob(f"{_UNFINISHED}*"):
        try:
            with (folder / _OWNER).open("wb") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            pass  # killed between the two, which the lock on the root never shows to the living
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                continue
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
