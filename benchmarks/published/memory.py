"""Memory: rows as requests, and what the traced step gives for them beside what was measured.

A row is left out for what its columns say, before anything is traced. A row that ran out of memory is asked whether
its step fits; the others are compared with the figure of their kind, and with nvidia-smi's where the notes have it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from published import fms, others
from published.floor import least_bytes
from published.gpus import key_of
from published.records import Record, is_count, note, number
from published.tracing import trace_all, transformers_version
from trainwright.errors import UserError
from trainwright.estimate.cuda_overhead import outside_bytes
from trainwright.estimate.request import Request
from trainwright.hardware.catalog import GpuSpec, catalog
from trainwright.plan.capacity import Capacity
from trainwright.plan.estimates import why_too_big

GIB = 1 << 30
KINDS = ("torch_allocated", "torch_reserved", "nvidia_smi")
"""How the kinds of memory figure begin."""
METHODS = ("full", "lora", "qlora")
COUNTS = ("seq_len", "micro_batch", "grad_accum", "world_size")
NO_FIGURE = "no memory figure"


@dataclass(frozen=True)
class Row:
    """A published row, the request it becomes, and what was measured."""

    name: str
    source: str
    slice: str
    request: Request
    transformers: str
    """The version that it was measured with."""
    gpu: GpuSpec | None
    outside_bytes: dict[str, int]
    """What nvidia-smi counts besides torch's allocator."""
    measured_gib: dict[str, float]
    """By kind of figure; the row's own is the first. Empty where it ran out of memory."""

    @property
    def ran_out_of_memory(self) -> bool:
        return not self.measured_gib

    @property
    def must_fail(self) -> bool:
        """Whether the weights and their like alone exceed the card."""
        capacity = self.request.capacity_bytes
        return capacity is not None and least_bytes(self.request) > capacity

    @property
    def key(self) -> tuple[str, str]:
        """Rows with the same key are the same request, with the same libraries."""
        return self.transformers, json.dumps(asdict(self.request), sort_keys=True)


def read_rows(records: Sequence[Record]) -> tuple[list[Row], Counter[str]]:
    """Return the rows that can be traced, and for the others how many for which reason."""
    rows, skipped = [], Counter[str]()
    for record in records:
        completed = with_length(record, records)
        reason = why_not(completed)
        if reason is None:
            try:
                rows.append(as_row(completed))
            except UserError as error:
                reason = "; ".join([error.message, *error.problems])
        if reason is not None:
            skipped[reason] += 1
    return rows, skipped


def why_not(record: Record) -> str | None:
    """Return why a row cannot be traced, by what its columns say alone."""
    out_of_memory = ran_out_of_memory(record)
    if not out_of_memory and not record["peak_mem_gib"]:
        return NO_FIGURE
    if reason := others.why_not(record["source"]):
        return reason
    if not record["source"].startswith(fms.SOURCE):
        return "unknown source: what its training program does is not described"
    if not out_of_memory and _kind(record) is None:
        return f"unknown kind of memory figure: `{record['mem_kind']}`"
    if not out_of_memory and number(record["peak_mem_gib"]) is None:
        return "peak_mem_gib is no number above zero"
    if record["method"] not in METHODS:
        return f"unknown method: `{record['method']}`"
    for name in COUNTS if record["method"] == "full" else (*COUNTS, "lora_rank"):
        if not is_count(record[name]):
            return f"{name} is no whole number above zero" if record[name] else f"{name} is missing"
    if out_of_memory and _gpu(record) is None:
        return f"out of memory on an unknown GPU: {record['gpu']}"
    return fms.why_not(record)


def with_length(record: Record, records: Sequence[Record]) -> Record:
    """Give a row that ran out of memory the length of the rows beside it.

    The source's own files state no length: here it was derived from the speed, which such a row does not have. Its
    scripts train all rows of a file at one length (scripts/benchmarks/benchmark.py, `max_seq_len_matrix`).
    """
    if record["seq_len"] or not ran_out_of_memory(record):
        return record
    beside = (r for r in records if r["source"] == record["source"] and note(r, "file") == note(record, "file"))
    lengths = {r["seq_len"] for r in beside if r["seq_len"]}
    return record | {"seq_len": lengths.pop()} if len(lengths) == 1 else record


def ran_out_of_memory(record: Record) -> bool:
    """Whether the notes say so."""
    return (note(record, "OUTCOME") or "").startswith("OOM")


def as_row(record: Record) -> Row:
    """Turn a row into a request on its GPU.

    Raises:
        UserError: the request has values out of range.
    """
    data, gpu, framework = fms.request_of(record), _gpu(record), note(record, "framework_config")
    if gpu is not None and gpu.compute_capability is not None:
        data |= {"compute_capability": gpu.compute_capability}
    request = Request.parse(data)
    outside = outside_bytes(request, gpu) | fms.contexts_of_others(request, gpu, framework)
    if gpu is not None:
        request = replace(request, capacity_bytes=_card_bytes(gpu) - sum(outside.values()))
    words = [record["model"].rpartition("/")[2], record["method"], *([framework] if framework else [])]
    words += [f"b{request.micro_batch_size}", request.strategy, f"x{request.world_size}"]
    return Row(
        name=" ".join(words),
        source=fms.SOURCE.removeprefix("github.com/"),
        slice="sharded" if request.world_size > 1 else record["method"],
        request=request,
        transformers=fms.transformers_of(record),
        gpu=gpu,
        outside_bytes=outside,
        measured_gib={} if ran_out_of_memory(record) else _measured(record),
    )


def compare_all(rows: Sequence[Row], pythons: Sequence[str]) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Return measured and predicted figures of the rows, and how many the trace refused for which reason.

    Each is traced by the interpreter that has its version of transformers, by the first where none has.
    """
    interpreters = {transformers_version(python): python for python in reversed(pythons)}
    answers = {}
    for version in sorted({row.transformers for row in rows}):
        asked = {r.key: asdict(r.request) for r in rows if r.transformers == version and not r.must_fail}
        python = interpreters.get(version, pythons[0])
        answers |= dict(zip(asked, trace_all(list(asked.values()), python), strict=True))
    figures, refused = [], Counter[str]()
    for row in rows:
        answer = answers.get(row.key)
        if answer is not None and "error" in answer:
            refused["; ".join([answer["error"].splitlines()[0], *answer.get("problems", [])])] += 1
        else:
            figures.append(_compare(row, answer))
    return figures, refused


def _compare(row: Row, answer: dict[str, Any] | None) -> dict[str, Any]:
    """Put figures beside each other; without an answer the step was not traced, as it cannot fit."""
    figures: dict[str, Any] = {
        "row": row.name,
        "source": row.source,
        "slice": row.slice,
        "measured_gib": row.measured_gib,
        "ran_out_of_memory": row.ran_out_of_memory,
    }
    if answer is None:
        least = least_bytes(row.request) / GIB
        errors = {kind: 100 * (least / gib - 1) for kind, gib in row.measured_gib.items()}
        return figures | {"predicted_out_of_memory": True, "at_least_gib": least, "error_pct": errors}
    peak, outside = answer["peak"], row.outside_bytes
    predicted = {
        "torch_allocated": peak["allocated_bytes"] / GIB,
        "torch_reserved": peak["reserved_bytes"] / GIB,
        "nvidia_smi": (peak["reserved_bytes"] + sum(outside.values())) / GIB,
    }
    return figures | {
        "predicted_gib": predicted,
        "error_pct": {kind: 100 * (predicted[kind] / gib - 1) for kind, gib in row.measured_gib.items()},
        "predicted_out_of_memory": peak["out_of_memory"] or not _plan_takes_it(row, predicted["nvidia_smi"]),
        "retries": peak["retries"],
        "where": f"{peak['phase']} {peak['operator']}",
        "parts_gib": {part: size / GIB for part, size in peak["parts_bytes"].items()},
        "outside_gib": {part: size / GIB for part, size in outside.items()},
        "versions": answer["versions"],
    }


def _plan_takes_it(row: Row, predicted_gib: float) -> bool:
    """Whether `trainwright plan` would say that this fits: it wants a part of the card to stay free."""
    capacity = Capacity(_card_bytes(row.gpu), "of the card")
    return why_too_big(int(predicted_gib * GIB), capacity) is None


def _measured(record: Record) -> dict[str, float]:
    own = _kind(record)
    assert own is not None
    measured = {own: float(record["peak_mem_gib"])}
    smi_mib = number(note(record, "nvidia_smi_mib") or "")
    if smi_mib is not None and own != "nvidia_smi":
        measured["nvidia_smi"] = smi_mib / 1024
    return measured


def _kind(record: Record) -> str | None:
    return next((kind for kind in KINDS if record["mem_kind"].startswith(kind)), None)


def _gpu(record: Record) -> GpuSpec | None:
    key = key_of(record["gpu"])
    return None if key is None else catalog().gpus[key]


def _card_bytes(gpu: GpuSpec) -> int:
    """What CUDA gives of a card, else what the driver reports."""
    if gpu.cuda_total_gib is not None:
        return int(gpu.cuda_total_gib.value * GIB)
    assert gpu.total_bytes is not None, gpu.key
    return gpu.total_bytes
