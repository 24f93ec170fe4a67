"""What a diagnosis reads: the logs and records of a run folder, of any folder, or files that are named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from trainwright.doctor.collectives import is_flight_record, is_stack
from trainwright.errors import ExitCode, UserError
from trainwright.runs import records
from trainwright.runs.folder import RunFolder
from trainwright.runs.writing import read_json

_BINARY: Final = (".safetensors", ".pt", ".pth", ".bin", ".arrow", ".parquet", ".zip", ".gz", ".png", ".so", ".npy")
_NOT_LOGS: Final = ("case.yaml", "tokenizer.json", "vocab.json")
MOST_FILES: Final = 2000


@dataclass
class Inputs:
    """Files by what they are, each with the name it is shown by."""

    logs: list[tuple[Path, str]] = field(default_factory=list)
    flight_records: list[tuple[Path, str]] = field(default_factory=list)
    stacks: list[tuple[Path, str]] = field(default_factory=list)
    metrics: list[Path] = field(default_factory=list)
    samples: list[Path] = field(default_factory=list)
    events: list[Path] = field(default_factory=list)
    hang: Path | None = None
    """What the launcher found in the last attempt, if that stood still."""
    run: RunFolder | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all that is read, for people."""
        named = [name for _, name in (*self.logs, *self.flight_records, *self.stacks)]
        return (*named, *(path.name for path in (*self.metrics, *self.samples, *self.events)))


def gather(paths: Sequence[Path]) -> Inputs:
    """Sort out what to read.

    Raises:
        UserError: one of the paths is not there, or there is nothing to read.
    """
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise UserError(
            f"there is no {' and no '.join(missing)}",
            hints=["give a run folder, log files, a folder of logs, or a job file (.yaml)"],
            exit_code=ExitCode.MISSING,
        )
    inputs = Inputs()
    for path in paths:
        if path.is_dir() and (path / "run.json").is_file():
            _add_run(inputs, RunFolder(path))
        elif path.is_dir():
            for file in _files(path):
                _add(inputs, file, str(file.relative_to(path)))
        else:
            _add(inputs, path, path.name if len(paths) > 1 else str(path))
    if not inputs.names:
        raise UserError("there is nothing to read", problems=[str(path) for path in paths], exit_code=ExitCode.MISSING)
    return inputs


def _files(folder: Path) -> Iterator[Path]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    for count, path in enumerate(files):
        if count >= MOST_FILES:
            return
        if path.name not in _NOT_LOGS and path.suffix not in _BINARY and not path.name.startswith("."):
            yield path


def _add_run(inputs: Inputs, folder: RunFolder) -> None:
    inputs.run = folder
    attempts = sorted(folder.logs_dir.glob("attempt_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    if attempts:
        hang = attempts[-1] / "hang.json"
        inputs.hang = hang if hang.is_file() else None
        for path in sorted(attempts[-1].glob("*")):
            if path.suffix == ".txt" and not path.stat().st_size:
                continue  # stacks that nobody asked for
            if path.suffix in (".log", ".txt") or path.name.startswith(("fr_", "flight")):
                _add(inputs, path, f"{attempts[-1].name}/{path.name}")
    prepare = folder.logs_dir / "prepare.log"
    if prepare.is_file() and prepare.stat().st_size:
        inputs.logs.append((prepare, "prepare.log"))
    for path in (folder.metrics_jsonl, folder.events_jsonl, *sorted(folder.path.glob("system*.jsonl"))):
        if path.is_file():
            _add(inputs, path, path.name)


def _add(inputs: Inputs, path: Path, name: str) -> None:
    if path.name == "metrics.jsonl":
        inputs.metrics.append(path)
    elif path.name == "events.jsonl":
        inputs.events.append(path)
    elif path.name.startswith("system") and path.suffix == ".jsonl":
        inputs.samples.append(path)
    elif path.name.endswith(".error.json"):
        return
    elif is_flight_record(path):
        inputs.flight_records.append((path, name))
    elif is_stack(path):
        inputs.stacks.append((path, name))
    else:
        inputs.logs.append((path, name))


def last_failure(events: Sequence[Path]) -> tuple[Path, dict[str, Any]] | None:
    """Return the failure that a run's launcher wrote down last, unless the run started again or ended since."""
    for path in events:
        failed = None
        for record in records.read(path):
            if record.get("event") == "failed":
                failed = record
            elif record.get("event") in ("started", "finished", "stopped"):
                failed = None
        if failed is not None:
            return path, failed
    return None


def stored(path: Path) -> dict[str, Any]:
    """Return a JSON file of the run folder; empty where it is missing or damaged."""
    try:
        content = read_json(path)
    except (OSError, UserError):
        return {}
    return content if isinstance(content, dict) else {}
