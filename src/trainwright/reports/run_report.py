"""Everything that is told of one run, read from its folder alone, whatever state that is in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from trainwright.doctor.finding import HEALTHY, Finding
from trainwright.errors import UserError
from trainwright.reports.attempts import Attempt, read_attempts, worked_s
from trainwright.reports.compared import Compared, compare
from trainwright.reports.incidents import Incident, alarms, incidents
from trainwright.reports.plots import Plot, plots_of
from trainwright.reports.steps import Steps, read_steps
from trainwright.reports.summary import Documents, Summary, summary_of
from trainwright.reports.system_curves import SystemCurves, read_samples
from trainwright.runs import records
from trainwright.runs.folder import RunFolder
from trainwright.runs.values import document, mapping, text, whole

MOST_INCIDENTS: Final = 200


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A choice of the plan and its reason."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """What a run measured, for a comparison with others; None is not available."""

    median_step_s: float | None
    tokens_per_s: float | None
    samples_per_s: float | None
    steps_per_epoch: int | None
    gpu_peak_bytes: float | None
    """Used memory of the GPU that used the most, as nvidia-smi shows it."""
    gpu_peak_pct: float | None
    gpu_utilization_pct: float | None
    """Mean over the GPUs while steps were done."""
    host_peak_bytes: float | None
    """Resident memory of the rank that took the most."""
    eval_loss: float | None


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """One run: asked, decided, predicted, measured, and what happened to it."""

    summary: Summary
    asked: Mapping[str, Any]
    """The resolved job, by dotted key."""
    layout: Mapping[str, Any]
    decided: tuple[Decision, ...]
    notes: tuple[str, ...]
    """Warnings and advice of the plan."""
    claims: Mapping[str, str]
    """What a guide claims for this job."""
    not_estimated: str | None
    compared: tuple[Compared, ...]
    measured: RunFigures
    sections_s: Mapping[int, Mapping[str, float]]
    """Seconds of each rank in each section, over all attempts."""
    plots: tuple[Plot, ...]
    incidents: tuple[Incident, ...]
    finding: Finding | None
    """Why it failed, where it did."""
    missing: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data; null is "not available"."""
        return {
            **{name: value for name, value in vars(self).items() if name in ("asked", "layout", "claims")},
            "summary": self.summary.to_json(),
            "decided": [asdict(decision) for decision in self.decided],
            "notes": list(self.notes),
            "not_estimated": self.not_estimated,
            "compared": [compared.to_json() for compared in self.compared],
            "measured": asdict(self.measured),
            "sections_s": {str(rank): dict(spent) for rank, spent in self.sections_s.items()},
            "plots": [plot.to_json() for plot in self.plots],
            "incidents": [asdict(incident) for incident in self.incidents],
            "finding": None if self.finding is None else self.finding.to_json(),
            "missing": list(self.missing),
        }


def read_report(folder: RunFolder) -> RunReport:
    """Read a run: unfinished, failed or damaged, `missing` says what could not be told."""
    documents = Documents.of(folder)
    lost = {path: records.PassedOver() for path in (folder.events_jsonl, folder.metrics_jsonl, folder.system_jsonl)}
    events = list(records.read(folder.events_jsonl, lost[folder.events_jsonl]))
    steps = read_steps(folder.metrics_jsonl, lost[folder.metrics_jsonl])
    samples = read_samples(folder, lost[folder.system_jsonl])
    attempts = read_attempts(folder, events, samples.spans)
    summary = summary_of(folder, documents, events, attempts, samples, steps.last)
    happened = [*incidents(events, attempts, steps), *alarms(folder, samples.heard_s)]
    plan, estimate = documents.plan, mapping(documents.plan, "estimate")
    return RunReport(
        summary=summary,
        asked=dict(_flat(documents.job)),
        layout=mapping(plan, "layout"),
        decided=tuple(_decisions(plan)),
        notes=tuple(_texts(plan, "warnings") + _texts(plan, "advice")),
        claims={key: str(value) for key, value in mapping(documents.job, "claims").items()},
        not_estimated=None if estimate else text(plan, "no_estimate"),
        compared=tuple(
            compare(plan, events, steps, samples, ran_s=worked_s(attempts), finished=summary.state == "finished")
        ),
        measured=_measured(plan, steps, samples),
        sections_s={rank: seen.sections_s_total for rank, seen in sorted(samples.ranks.items())},
        plots=tuple(plots_of(steps, samples)),
        incidents=tuple(happened[:MOST_INCIDENTS]),
        finding=_finding(folder, summary),
        missing=(
            *documents.missing,
            *(f"{path.name}: {of.count:,} records cannot be read" for path, of in lost.items() if of.count),
            *_missing(folder, steps, samples, attempts, len(happened)),
        ),
    )


def _measured(plan: Mapping[str, Any], steps: Steps, samples: SystemCurves) -> RunFigures:
    step_s, batch = steps.median_step_s, whole(mapping(plan, "layout"), "global_batch_size")
    fullest = max(samples.gpus.values(), default=None, key=lambda gpu: gpu.peak_bytes or 0)
    resident = [seen.resident_peak_bytes for seen in samples.ranks.values() if seen.resident_peak_bytes is not None]
    return RunFigures(
        median_step_s=step_s,
        tokens_per_s=steps.tokens_per_s,
        samples_per_s=batch / step_s if batch and step_s else None,
        steps_per_epoch=steps.steps_per_epoch,
        gpu_peak_bytes=fullest.peak_bytes if fullest else None,
        gpu_peak_pct=fullest.peak_pct if fullest else None,
        gpu_utilization_pct=samples.mean_utilization_pct(),
        host_peak_bytes=max(resident, default=None),
        eval_loss=steps.eval_loss,
    )


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif f"{prefix}{key}".partition(".")[0] != "claims":
            yield f"{prefix}{key}", value


def _decisions(plan: Mapping[str, Any]) -> Iterator[Decision]:
    for key, choice in sorted(mapping(plan, "choices").items()):
        if isinstance(choice, dict):
            yield Decision(key=key, value=choice.get("value"), reason=text(choice, "reason") or "")


def _texts(plan: Mapping[str, Any], name: str) -> list[str]:
    lines = plan.get(name)
    return [str(line) for line in lines] if isinstance(lines, list) else []


def _finding(folder: RunFolder, summary: Summary) -> Finding | None:
    """Return doctor's finding of a run that failed or fell silent."""
    if summary.state not in ("failed", "silent"):
        return None
    # Imported here: the table of causes takes longer to read than most runs.
    from trainwright.doctor.after import diagnose

    try:
        finding = diagnose([folder.path]).finding
    except UserError:
        return None
    return None if finding.cause == HEALTHY else finding


def _missing(
    folder: RunFolder, steps: Steps, samples: SystemCurves, attempts: list[Attempt], happened: int
) -> Iterator[str]:
    if text(document(folder.run_json, []), "run_id") is None:
        yield "run.json names no run: the folder's checkpoints cannot be told from another run's"
    if not folder.events_jsonl.exists():
        yield "there is no events.jsonl: how the run began and ended is not told"
    if not steps.last:
        yield "metrics.jsonl has no step: loss and pace are not available"
    if not samples.count:
        yield "system.jsonl has no sample: GPUs and host are not available"
    elif not samples.gpus:
        yield "no GPU of the run was sampled"
    if attempts and all(attempt.duration_s is None for attempt in attempts):
        yield "when the attempts began and ended is not told"
    if happened > MOST_INCIDENTS:
        yield f"{happened - MOST_INCIDENTS:,} more incidents are in events.jsonl and alerts.jsonl"
