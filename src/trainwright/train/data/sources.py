"""From a path or a hub name to the files that hold the rows."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.errors import ExitCode, UserError

KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_FORMS = "a .jsonl, .json, .csv or .parquet file, a folder of such files, a folder saved by `datasets`, or a hub name"


@dataclass(frozen=True)
class Source:
    """Where rows come from: files of one kind, read one after the other."""

    name: str
    """As the job has it."""
    kind: str
    files: tuple[Path, ...]

    def digests(self) -> list[str]:
        """Return the sha256 of each file's contents, in the order of reading."""
        digests = []
        for path in self.files:
            with path.open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        return digests


def is_local(path_or_name: str) -> bool:
    """Whether the name means a path of this machine rather than a data set of the hub."""
    path = Path(path_or_name).expanduser()
    looks_like_path = path.is_absolute() or path_or_name.startswith((".", "~")) or path.suffix.lower() in KINDS
    return looks_like_path or path.exists()


def find_source(path_or_name: str, split: str) -> Source:
    """Return the files behind a path or a hub name; `split` chooses among the splits of a folder or hub data set.

    Raises:
        UserError: nothing there, a kind that is not known, no such split, or a hub data set that cannot be had.
    """
    if not is_local(path_or_name):
        return _from_hub(path_or_name, split)
    path = Path(path_or_name).expanduser()
    if not path.exists():
        raise UserError(
            f"data: there is no file or folder {path}",
            hints=[f"data.path takes {_FORMS}; relative paths start at {Path.cwd()}"],
            exit_code=ExitCode.MISSING,
        )
    if path.is_dir():
        return _from_folder(path_or_name, path, split)
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        raise UserError(f"data: {path} is of no known kind", hints=[f"data.path takes {_FORMS}"])
    return Source(path_or_name, kind, (path,))


def _from_folder(name: str, folder: Path, split: str) -> Source:
    if (folder / "dataset_dict.json").exists():
        splits = _read_object(folder / "dataset_dict.json").get("splits", [])
        if split not in splits:
            raise UserError(
                f"data: {folder} has no split `{split}`", hints=[f"data.split is one of {', '.join(splits)}"]
            )
        folder = folder / split
    if (folder / "state.json").exists():
        listed = _read_object(folder / "state.json").get("_data_files", [])
        files = tuple(folder / Path(entry["filename"]).name for entry in listed)
        return Source(name, "arrow", files)
    return _from_shards(name, folder, split)


def _from_shards(name: str, folder: Path, split: str) -> Source:
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in KINDS and path.is_file() and not _is_hidden(path.relative_to(folder))
    ]
    of_split = [path for path in files if _names_split(path.relative_to(folder), split)]
    files = of_split or files
    kinds = sorted({KINDS[path.suffix.lower()] for path in files})
    if not files:
        raise UserError(f"data: the folder {folder} holds no data files", hints=[f"data.path takes {_FORMS}"])
    if len(kinds) > 1:
        raise UserError(
            f"data: the folder {folder} holds files of several kinds: {', '.join(kinds)}",
            hints=["give one file, or a folder with files of one kind"],
        )
    return Source(name, kinds[0], tuple(files))


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _names_split(path: Path, split: str) -> bool:
    """Whether a shard names its split as on the hub: `train-00000-of-00002.parquet`, `train.jsonl`, `train/0.csv`."""
    return split in path.parts[:-1] or re.match(rf"{re.escape(split)}[-_.]", path.name) is not None


def _from_hub(name: str, split: str) -> Source:
    if not _HUB_NAME.match(name):
        raise UserError(f"data: {name!r} is neither a path nor a hub name", hints=[f"data.path takes {_FORMS}"])
    from datasets import load_dataset

    try:
        dataset: Any = load_dataset(name, split=split)
    except (OSError, ValueError) as error:
        raise UserError(
            f"data: `{name}` is no file here, and the hub data set cannot be loaded: {_first_line(error)}",
            hints=[
                f"for a local file, check the path; relative paths start at {Path.cwd()}",
                "without a network, fetch it first where there is one: "
                f"python -c \"import datasets; datasets.load_dataset('{name}')\", and keep HF_HOME",
            ],
            exit_code=ExitCode.MISSING,
        ) from error
    return Source(name, "arrow", tuple(Path(entry["filename"]) for entry in dataset.cache_files))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"data: {path} is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"data: {path} holds no object")
    return value
