"""The checkpoints that a user's own script left, by the names that transformers and accelerate give theirs."""

from __future__ import annotations

import json
import re
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"checkpoint[-_](\d{1,18})", re.ASCII)
_PLACES = (".", "checkpoints")
"""transformers saves in the output folder, accelerate's automatic names are below `checkpoints`."""
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that looks whole, None where there is none; `skipped` says why newer ones do not."""

    path: Path | None
    step: int
    skipped: tuple[str, ...]


def newest_checkpoint(output_dir: Path) -> Found:
    """Return the checkpoint with the largest number that is not visibly half written.

    What a script saves is its own affair, so there is no proof: a checkpoint is passed over when a file of it is cut
    short, or when it lacks files that the one before it has.
    """
    found = sorted(_checkpoints(output_dir), reverse=True)
    skipped: list[str] = []
    for place, (step, path) in enumerate(found):
        older = found[place + 1][1] if place + 1 < len(found) else None
        problem = _damage(path) or (None if older is None else _missing_beside(path, older))
        if problem is None:
            return Found(path, step, tuple(skipped))
        skipped.append(f"Skipped {path.name}: {problem}")
    return Found(None, 0, tuple(skipped))


def _checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    folders = [output_dir / place for place in _PLACES if (output_dir / place).is_dir()]
    entries = [entry for folder in folders for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink()]
    return [(int(match[1]), entry) for entry in entries if (match := _NAME.fullmatch(entry.name))]


def _damage(path: Path) -> str | None:
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    if not files:
        return "it is empty"
    return next((f"{file.relative_to(path)} {problem}" for file in files if (problem := _cut_short(file))), None)


def _cut_short(file: Path) -> str | None:
    if file.suffix == ".safetensors":
        return None if _is_whole_safetensors(file) else "is cut short"
    if file.suffix == ".json":
        try:
            json.loads(file.read_bytes())
        except ValueError:
            return "is cut short"
    if file.suffix in (".pt", ".pth", ".bin", ".pkl", ".distcp"):
        if file.stat().st_size == 0:
            return "is empty"
        with file.open("rb") as opened:
            is_archive = opened.read(4) == b"PK\x03\x04"
        # torch.save writes an archive, whose directory stands at its end.
        return "is cut short" if is_archive and not zipfile.is_zipfile(file) else None
    return None


def _is_whole_safetensors(file: Path) -> bool:
    """Compare the size with what the header says (format of safetensors: 8 bytes of length, JSON, data)."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            return False
        try:
            header = json.loads(opened.read(length))
        except ValueError:
            return False
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return bool(size == 8 + length + max(ends, default=0))


def _missing_beside(path: Path, older: Path) -> str | None:
    missing = sorted(_file_kinds(older) - _file_kinds(path))
    return None if not missing else f"it has no {missing[0].replace('#', 'N')}, as {older.name} has"


def _file_kinds(path: Path) -> set[str]:
    """Return the names of the files below a folder, numbers in them left open (`rng_state_#.pth`)."""
    return {_DIGITS.sub("#", str(file.relative_to(path))) for file in path.rglob("*") if file.is_file()}
