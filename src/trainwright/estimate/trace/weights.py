"""Weights of a local folder without their values: safetensors files are read as far as their headers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trainwright.errors import UserError
from trainwright.model_folder import cut_short

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class SafeOpen:
    """Stands in for `safetensors.safe_open`; tensors have shapes and types, made by `made_in` (a FakeTensorMode)."""

    made_in: Any = None

    def __init__(self, filename: Any, framework: str = "pt", device: Any = "cpu", **options: Any) -> None:
        if (why := cut_short(Path(filename))) is not None:
            raise UserError(f"{filename} is incomplete: {why}", hints=["copy or download it again"])
        with Path(filename).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        self._metadata = header.pop("__metadata__", None)
        self._entries: dict[str, dict[str, Any]] = header
        self._device = f"cuda:{device}" if isinstance(device, int) else device

    def __enter__(self) -> SafeOpen:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def metadata(self) -> Any:
        """Return the metadata of the file."""
        return self._metadata

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._entries)

    def offset_keys(self) -> list[str]:
        """Return the names in the order of the file."""
        return sorted(self._entries, key=lambda name: int(self._entries[name]["data_offsets"][0]))

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor without values."""
        entry = self._entries[name]
        with SafeOpen.made_in:
            return torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]], device=self._device)

    def get_slice(self, name: str) -> Slice:
        """Return a tensor of which parts can be read."""
        return Slice(self, name, self._entries[name])


class Slice:
    """Stands in for a safetensors slice."""

    def __init__(self, file: SafeOpen, name: str, entry: dict[str, Any]) -> None:
        self._file, self._name, self._entry = file, name, entry

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self._entry["shape"])

    def get_dtype(self) -> str:
        """Return the type as the file names it."""
        return str(self._entry["dtype"])

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._file.get_tensor(self._name)[index]


def install(mode: Any) -> None:
    """Let safetensors and what is imported after it read headers only, for this process."""
    import safetensors
    import safetensors.torch

    SafeOpen.made_in = mode
    safetensors.safe_open = safetensors.torch.safe_open = SafeOpen
