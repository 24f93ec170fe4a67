"""The samples of a token cache, by index."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from trainwright.errors import ExitCode, UserError
from trainwright.train.data.cache import read_meta
from trainwright.train.data.packing import join_documents


class TokenDataset:
    """The samples of a finished cache; `dataset[i]` is a dict of int32 arrays, one a stream.

    Tokens are read with `os.pread`, not mapped: every page touched through a mapping counts as resident memory of the
    process until the system takes it back, so that a shuffled epoch would grow to the size of the data in each rank.
    The offsets are mapped; they are 8 bytes a document and stream.
    """

    def __init__(self, cache_dir: Path | str) -> None:
        """Open the cache.

        Raises:
            UserError: there is no finished cache, or a file of it is missing or cut short.
        """
        self.path = Path(cache_dir)
        meta = read_meta(self.path)
        if meta is None:
            raise UserError(
                f"the token cache {self.path} is missing or damaged",
                hints=["run the job again: it is made anew from the data"],
                exit_code=ExitCode.MISSING,
            )
        self.meta = meta
        self._files = {name: (self.path / f"{name}.bin").open("rb", buffering=0) for name in meta.streams}
        self._offsets = {name: self._mapped(f"{name}.offsets", np.int64) for name in meta.streams}
        self._packs = (self._mapped("pack.documents", np.int64), self._mapped("pack.offsets", np.int64))
        self.targets: np.ndarray = np.fromfile(self.path / "targets", dtype=np.int32)
        """Target tokens of each sample, int32 (samples,)."""
        self.lengths: np.ndarray = self._lengths()
        """Tokens of each sample, those of its longest stream, int32 (samples,)."""

    def __len__(self) -> int:
        return self.meta.samples

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        if not self.meta.packed:
            return self._document(index)
        documents, offsets = self._packs
        return join_documents([self._document(int(i)) for i in documents[offsets[index] : offsets[index + 1]]])

    def __reduce__(self) -> tuple[type[TokenDataset], tuple[Path]]:
        """Open the files again in a process that was spawned."""
        return TokenDataset, (self.path,)

    def _document(self, index: int) -> dict[str, np.ndarray]:
        document = {}
        for name, file in self._files.items():
            start, end = (int(offset) * 4 for offset in self._offsets[name][index : index + 2])
            raw = os.pread(file.fileno(), end - start, start)
            assert len(raw) == end - start, f"{self.path / name}.bin was cut short while it was read"
            document[name] = np.frombuffer(raw, dtype=np.int32)
        return document

    def _lengths(self) -> np.ndarray:
        lengths: np.ndarray = np.max([np.diff(offsets) for offsets in self._offsets.values()], axis=0).astype(np.int32)
        if not self.meta.packed:
            return lengths
        documents, offsets = self._packs
        packs: np.ndarray = np.add.reduceat(lengths[documents], offsets[:-1])
        return packs

    def _mapped(self, name: str, dtype: type[np.int64]) -> np.ndarray:
        if name not in self.meta.sizes:
            return np.zeros(0, dtype=dtype)
        return np.memmap(self.path / name, dtype=dtype, mode="r")
