"""A run in one line: how it is, how long it took, of what model, on what, and how far it came."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from trainwright.errors import ExitCode
from trainwright.reports.attempts import Attempt, read_attempts, worked_s
from trainwright.reports.system_curves import SystemCurves, first_and_last
from trainwright.runs import records
from trainwright.runs.folder import RunFolder
from trainwright.runs.lock import may_be_held
from trainwright.runs.values import document, mapping, mappings, number, text, whole
from trainwright.watch.json_lines import TAIL_BYTES, Follower
from trainwright.watch.run_state import state_of

MEANINGS: Final = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "a rank raised an exception",
    ExitCode.USAGE: "the job or its data is wrong",
    ExitCode.MISSING: "something that it needs is missing",
    ExitCode.STORAGE: "the storage failed or had no room",
    ExitCode.STOPPED: "stopped cleanly and saved; the same command goes on",
    ExitCode.HANG: "a rank hung",
    ExitCode.OUT_OF_MEMORY: "out of memory",
    ExitCode.NO_VALID_CHECKPOINT: "no checkpoint was whole",
}
"""What the exit code of a run, or of the rank that ended it, means."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run is and where it stands; None is not known. Times are seconds since the epoch."""

    name: str
    folder: str
    run_id: str | None
    state: str
    """preparing, running, finished, stopped, failed or silent, as `watch` has it; `missing` where no folder is."""
    exit_code: int | None = None
    meaning: str | None = None
    """What its end means, or why nothing is known of it."""
    started_s: float | None = None
    duration_s: float | None = None
    """Of all attempts together."""
    attempts: int = 0
    model: str | None = None
    strategy: str | None = None
    devices: str | None = None
    ranks: int | None = None
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Documents:
    """What the JSON files of a run folder hold, and which of them are missing or damaged."""

    job: dict[str, Any]
    plan: dict[str, Any]
    missing: tuple[str, ...]

    @classmethod
    def of(cls, folder: RunFolder) -> Documents:
        """Read them."""
        missing: list[str] = []
        return cls(document(folder.resolved_json, missing), document(folder.plan_json, missing), tuple(missing))


def summarize(folder: RunFolder) -> Summary:
    """Return how a run stands, from the ends of its files: a long run costs as much as a short one."""
    samples = first_and_last(folder)
    last = list(Follower(folder.metrics_jsonl, from_end=TAIL_BYTES).new(containing=b'"kind":"train"'))
    events = list(records.read(folder.events_jsonl))
    attempts = read_attempts(folder, events, samples.spans)
    return summary_of(folder, Documents.of(folder), events, attempts, samples, last[-1] if last else {})


def summary_of(
    folder: RunFolder,
    documents: Documents,
    events: Sequence[Mapping[str, Any]],
    attempts: Sequence[Attempt],
    samples: SystemCurves,
    last: Mapping[str, Any],
) -> Summary:
    """Return how a run stands; of the samples the first and the last suffice. `last` is its newest record of a step."""
    newest_attempt = max((attempt.number for attempt in attempts), default=0)
    signs = [samples.heard_s, *(attempt.started_s for attempt in attempts)]
    heard_s = max((sign for sign in signs if sign is not None), default=None)
    state, detail = state_of(folder, events, heard_s=heard_s, newest_attempt=newest_attempt, now_s=time.time())
    exit_code, meaning = _end(folder, state, detail, attempts)
    layout = mapping(documents.plan, "layout")
    first_s = min((attempt.started_s for attempt in attempts if attempt.started_s is not None), default=None)
    return Summary(
        name=folder.path.name,
        folder=str(folder.path),
        run_id=text(document(folder.run_json, []), "run_id"),
        state=state,
        exit_code=exit_code,
        meaning=meaning,
        started_s=first_s,
        duration_s=worked_s(attempts),
        attempts=len(attempts),
        model=model_name(documents.job),
        strategy=text(layout, "strategy"),
        devices=devices_of(documents.plan),
        ranks=whole(layout, "ranks"),
        step=whole(last, "step"),
        total_steps=samples.total_steps,
        loss=number(last, "loss"),
    )


def model_name(job: Mapping[str, Any]) -> str | None:
    """Return the model that a job names, `gpt2 from scratch`, or its script."""
    model = mapping(job, "model")
    scratch = text(mapping(model, "from_scratch"), "architecture")
    script = job.get("script")
    if text(model, "name"):
        return text(model, "name")
    if scratch:
        return f"{scratch} from scratch"
    return " ".join(map(str, script)) if isinstance(script, list) else None


def devices_of(plan: Mapping[str, Any]) -> str | None:
    """Return `2 x NVIDIA A100-SXM4-80GB`; off CUDA the ranks, as they share one device."""
    layout = mapping(plan, "layout")
    names = [name for device in mappings(plan, "devices") if (name := text(device, "name")) is not None]
    if layout.get("device") == "cuda" and names:
        return " + ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    ranks, device = whole(layout, "ranks"), text(layout, "device")
    return f"{ranks} x {device}" if ranks and device else None


def _end(
    folder: RunFolder, state: str, detail: str | None, attempts: Sequence[Attempt]
) -> tuple[int | None, str | None]:
    """Return the exit code that a run's end came with, as far as it is known, and what it means."""
    if state in ("finished", "stopped"):
        code = ExitCode.DONE if state == "finished" else ExitCode.STOPPED
        return int(code), MEANINGS[code]
    if state == "preparing":
        if may_be_held(folder):
            return None, None
        began = "it ended before its first step" if attempts else "planned only, or ended before its ranks began"
        return None, f"no process works on it: {began}"
    if state != "failed":
        return None, detail
    code_of_rank = attempts[-1].exit_code if attempts else None
    if code_of_rank is not None and code_of_rank < 0:
        with suppress(ValueError):
            return code_of_rank, f"rank {attempts[-1].rank} was ended by {signal.Signals(-code_of_rank).name}"
    if code_of_rank not in set(ExitCode):
        return code_of_rank, detail
    meaning = None if code_of_rank is None else MEANINGS[ExitCode(code_of_rank)]
    return code_of_rank, ": ".join(part for part in (meaning, detail) if part)


def gone(path: Path, run_id: str) -> Summary:
    """Return the line of a run whose folder is no longer where it was."""
    what = "another run is in its folder now" if (path / "run.json").is_file() else "its folder was moved or deleted"
    return Summary(name=path.name, folder=str(path), run_id=run_id, state="missing", meaning=what)
