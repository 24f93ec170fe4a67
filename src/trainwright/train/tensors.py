"""Tensors on disk: safetensors files, each tensor whole in one of them, under Hugging Face's file names."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def shard_name(stem: str, shard: int, shards: int) -> str:
    """Return the file name of one shard, as transformers names it; a single file has no numbers."""
    return f"{stem}.safetensors" if shards == 1 else f"{stem}-{shard + 1:05d}-of-{shards:05d}.safetensors"


class ShardWriter:
    """Spreads whole tensors over the ranks' files: each goes to the rank with the fewest bytes so far.

    Every rank sees every tensor (gathering is collective) and keeps its own in host memory, so a rank holds
    1 / world size of the whole.
    """

    def __init__(self, stem: str, *, rank: int, shards: int) -> None:
        self._stem, self._rank, self._shards = stem, rank, shards
        self._bytes = [0] * shards
        self._own: dict[str, torch.Tensor] = {}
        self.weight_map: dict[str, str] = {}

    @property
    def file_name(self) -> str:
        """Name of this rank's file."""
        return shard_name(self._stem, self._rank, self._shards)

    @property
    def own_bytes(self) -> int:
        """Bytes of the tensors in this rank's file."""
        return self._bytes[self._rank] if self._rank < self._shards else 0

    def collect(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take in all tensors, keeping this rank's."""
        for name, tensor in tensors:
            shard = self._bytes.index(min(self._bytes))
            self._bytes[shard] += tensor.numel() * tensor.element_size()
            self.weight_map[name] = shard_name(self._stem, shard, self._shards)
            if shard == self._rank:
                self._own[name] = tensor.detach().to("cpu", copy=True).contiguous()

    def write(self, folder: Path) -> Path | None:
        """Write this rank's file and return its path; None for a rank beyond the number of shards."""
        if self._rank >= self._shards:
            return None
        path = folder / self.file_name
        save_file(self._own, path, metadata={"format": "pt"})
        return path

    def write_index(self, folder: Path) -> Path | None:
        """Write the index that transformers looks for beside several files; None for a single one."""
        if self._shards == 1:
            return None
        path = folder / f"{self._stem}.safetensors.index.json"
        index = {"metadata": {"total_size": sum(self._bytes)}, "weight_map": self.weight_map}
        path.write_text(json.dumps(index, indent=1))
        return path


class TensorReader:
    """Reads whole tensors or rows of them from the files that a ShardWriter wrote.

    Out of `files`, the names that the manifest lists: whatever else lies in the folder was never checked.
    """

    def __init__(self, folder: Path, stem: str, files: Iterable[str]) -> None:
        files = sorted(files)
        own = fnmatch.filter(files, f"{stem}.safetensors") + fnmatch.filter(files, f"{stem}-*-of-*.safetensors")
        self._files = {}
        for file in own:
            handle = safe_open(folder / file, framework="pt", device="cpu")
            for name in handle.keys():  # noqa: SIM118  (a handle is not a dict)
                self._files[name] = handle

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def whole(self, name: str) -> torch.Tensor:
        """Return one tensor."""
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows `start` to `stop` of one tensor, reading no others."""
        tensor: torch.Tensor = self._files[name].get_slice(name)[start:stop]
        return tensor
