"""What finished runs measured, next to what was predicted for them: kept on the user's machine, for later predictions.

One line a run in `calibration.jsonl`. It holds figures, the model of GPU and library versions; no paths, no names.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from trainwright.errors import UserError
from trainwright.hardware.inventory import Device
from trainwright.runs import records
from trainwright.runs.folder import RunFolder
from trainwright.runs.user_data import user_data_dir
from trainwright.runs.writing import read_json

LARGEST_FILE_BYTES: Final = 2**20
"""Some two thousand runs; the file then becomes `calibration.old.jsonl`, and the one before is gone."""
LEAST_STEPS: Final = 3
"""Fewer say nothing of the pace: the first steps of a run load kernels and fill caches."""
_PEAKS: Final = ("allocated_bytes", "reserved_bytes", "device_bytes")
_LIBRARIES: Final = ("torch", "transformers", "peft", "bitsandbytes", "deepspeed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What runs must share to tell about each other.

    `gpu` is the model (`gpu_model`), several joined by `+`; `versions` are those of the libraries to the second
    number, empty where nothing is installed to run with.
    """

    gpu: str
    strategy: str
    method: str
    precision: str
    versions: str

    def __str__(self) -> str:
        return f"{self.gpu}, {self.method} {self.precision}, {self.strategy}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """Peaks of one rank in bytes; of the rank that takes the most."""

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int

    @property
    def fragmentation(self) -> float:
        """Reserved over allocated."""
        return self.reserved_bytes / self.allocated_bytes

    @property
    def outside_bytes(self) -> int:
        """What lies outside torch's allocator."""
        return self.device_bytes - self.reserved_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredFigures:
    """Memory, and seconds a token of all ranks together; None: not known."""

    memory: Peaks | None
    token_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """One run: what was predicted before it, and what it measured."""

    run_id: str
    kind: Kind
    predicted: MeasuredFigures
    measured: MeasuredFigures


def record_run(folder: RunFolder, data_dir: Path | None = None) -> str | None:
    """Keep what a run measured; return None, or why nothing was kept, which is no reason to end a run."""
    try:
        run = _measured_run(folder)
    except (OSError, UserError, KeyError, TypeError, ValueError) as error:
        return f"nothing was kept for later predictions: the run's records cannot be read ({error})"
    if run is None:
        return "nothing was kept for later predictions: the run was not on GPUs, not estimated, or too short"
    try:
        path = _file(data_dir)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > LARGEST_FILE_BYTES:
            path.replace(_older(path))
        records.append(path, dataclasses.asdict(run))
    except (OSError, RuntimeError) as error:
        return f"nothing was kept for later predictions: {error}"
    return None


def stored_runs(data_dir: Path | None = None) -> tuple[MeasuredRun, ...]:
    """Return all runs on record, one entry a run (its last), without lines that are torn or make no sense."""
    try:
        path = _file(data_dir)
        lines = [*records.read(_older(path)), *records.read(path)]
    except (OSError, RuntimeError):
        return ()
    found = {run.run_id: run for run in _understood(lines)}
    return tuple(found[run_id] for run_id in sorted(found))


def gpu_model(device: Device) -> str:
    """Return the model's key in the catalogue, or its driver's name; a MIG instance is a model of its own."""
    return device.name if device.mig is not None else device.catalog_key or device.name


def kind_of(gpus: Iterable[str], *, strategy: str, method: str, precision: str) -> Kind:
    """Return the kind of a run on these models of GPU with the libraries that are installed here."""
    return Kind(
        gpu="+".join(sorted(set(gpus))), strategy=strategy, method=method, precision=precision, versions=_versions()
    )


def _file(data_dir: Path | None) -> Path:
    return (data_dir or user_data_dir()) / "calibration.jsonl"


def _older(path: Path) -> Path:
    return path.with_suffix(".old.jsonl")


@cache
def _versions() -> str:
    found = []
    for library in _LIBRARIES:
        try:
            version = re.match(r"\d+\.\d+", importlib.metadata.version(library))
        except importlib.metadata.PackageNotFoundError:
            continue
        if version is not None:
            found.append(f"{library} {version[0]}")
    return ", ".join(found)


def _measured_run(folder: RunFolder) -> MeasuredRun | None:
    plan, job = read_json(folder.plan_json), read_json(folder.resolved_json)
    layout, estimate = plan["layout"], plan.get("estimate")
    ranks = _last_measured(folder)
    if layout["device"] != "cuda" or not estimate or not ranks:
        return None
    # Not the corrected figures: what they were corrected by would count again.
    memory, step_s = _as_first_predicted(estimate)
    planned_tokens = layout["global_batch_size"] * job["data"]["max_length"]
    return MeasuredRun(
        run_id=folder.run_id,
        kind=kind_of(
            (device["model"] for device in plan["devices"]),
            strategy=layout["strategy"],
            method=job["method"]["type"],
            precision=layout["precision"],
        ),
        predicted=MeasuredFigures(
            memory=Peaks(**{name: memory[name] for name in _PEAKS}),
            token_s=None if step_s is None else step_s / planned_tokens,
        ),
        measured=MeasuredFigures(
            memory=_largest(ranks),
            # By the token: the samples of a run are mostly shorter than the length it was planned for.
            token_s=max(1 / rank["tokens_per_s"] for rank in ranks),
        ),
    )


def _as_first_predicted(estimate: Mapping[str, Any]) -> tuple[Mapping[str, Any], float | None]:
    """Memory and seconds of a step before any calibration, which a plan keeps under `uncalibrated`."""
    if first := estimate.get("uncalibrated"):
        return first["memory"], first["step_s"]
    time = estimate["time"]
    return estimate["memory"], None if time is None else time["step_s"]


def _last_measured(folder: RunFolder) -> list[dict[str, Any]]:
    """What the ranks of the last attempt measured, if it went on for long enough."""
    events = [e for e in records.read(folder.events_jsonl) if e.get("event") == "measured"]
    return [e for e in events if e["attempt"] == events[-1]["attempt"] and e["steps"] >= LEAST_STEPS]


def _largest(ranks: Iterable[Mapping[str, Any]]) -> Peaks | None:
    values = {name: [rank[name] for rank in ranks] for name in _PEAKS}
    if any(None in of_ranks for of_ranks in values.values()):
        return None
    return Peaks(**{name: max(of_ranks) for name, of_ranks in values.items()})


def _understood(lines: Iterable[Mapping[str, Any]]) -> Iterator[MeasuredRun]:
    for line in lines:
        try:
            run = MeasuredRun(
                run_id=line["run_id"],
                kind=Kind(**line["kind"]),
                predicted=_figures(line["predicted"]),
                measured=_figures(line["measured"]),
            )
        except (KeyError, TypeError):
            continue
        texts = (run.run_id, *dataclasses.astuple(run.kind))
        if all(isinstance(text, str) for text in texts) and all(map(_make_sense, (run.predicted, run.measured))):
            yield run


def _figures(entry: Mapping[str, Any]) -> MeasuredFigures:
    memory = entry["memory"]
    return MeasuredFigures(memory=None if memory is None else Peaks(**memory), token_s=entry["token_s"])


def _make_sense(figures: MeasuredFigures) -> bool:
    """Whether these are figures of a run, in a file that anything may have written to."""
    memory, token_s = figures.memory, figures.token_s
    if token_s is not None and not (isinstance(token_s, float) and 0 < token_s < math.inf):
        return False
    if memory is None:
        return True
    sizes = dataclasses.astuple(memory)
    return all(type(size) is int for size in sizes) and 0 < sizes[0] <= sizes[1] <= sizes[2] < 2**60
