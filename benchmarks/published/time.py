"""Time: rows as steps, and what the estimate says of each beside what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

from published import fms, fsdp_qlora, internevo, lambda_bert, llm_foundry, torchtitan
from published.gpus import devices_of, key_of
from published.models import config_of
from published.records import Record, is_count, number
from trainwright.anatomy import Anatomy, anatomy, read_config
from trainwright.errors import UserError
from trainwright.estimate.request import Request
from trainwright.estimate.time import step_time
from trainwright.hardware.inventory import Device

Case = tuple[Anatomy, Request, tuple[Device, ...], float]
SOURCES: tuple[ModuleType, ...] = (lambda_bert, llm_foundry, torchtitan, internevo, fsdp_qlora)
OPTIONS: dict[str, Callable[[Record], dict[str, Any]]] = {
    internevo.SOURCE: lambda _: {"network_gb_s": internevo.NETWORK_GB_S},
    lambda_bert.SOURCE: lambda record: {"peer_access": False, "update": lambda_bert.update_of(record)},
}
"""What a source says of the connections of its GPUs, and of an optimizer of its own."""
METHODS = ("full", "lora", "qlora")
COUNTS = ("micro_batch", "world_size", "seq_len", "grad_accum")


def time_rows(records: list[Record]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return measured and predicted seconds of a step for each row, and why how many rows are left out.

    A row is left out by its configuration alone, before anything is estimated.
    """
    rows: list[dict[str, Any]] = []
    skipped: Counter[str] = Counter()
    for number_of_row, record in enumerate(records):
        try:
            source, case = _case(record)
            if isinstance(case, str):
                skipped[case] += 1
                continue
            model, request, devices, measured = case
            options = OPTIONS[source](record) if source in OPTIONS else {}
            found = step_time(model, request, devices, **options)
        except UserError as error:
            skipped["; ".join([error.message, *error.problems])] += 1
            continue
        rows.append(
            {
                "row": f"{number_of_row}: {_name(record)}",
                "slice": "sharded" if request.strategy not in ("single", "ddp") else request.method.type,
                "source": source.removeprefix("github.com/"),
                "measured_s": measured,
                "predicted_s": found.step_s,
                "low_s": found.low_s,
                "high_s": found.high_s,
                "error_pct": 100 * (found.step_s / measured - 1),
            }
        )
    return rows, dict(skipped)


def _name(record: Record) -> str:
    ranks = record["world_size"].removesuffix(".0")
    what = f"{record['model']} {record['method']} {record['precision'].split(' (')[0]}"
    return f"{ranks}x {record['gpu']}, {what}, {record['micro_batch']} x {record['seq_len'].removesuffix('.0')}"


def _case(record: Record) -> tuple[str, Case | str]:
    """Return the source of a row, and its step or the reason why there is none."""
    if record["source"].startswith(fms.SOURCE):
        return fms.SOURCE, _checked(record, _fms_why_not, _fms_case)
    for module in SOURCES:
        if record["source"].startswith(module.SOURCE):
            return module.SOURCE, _checked(record, module.why_not, module.case_of)
    return "", "no time is measured, or what the training program does is not described"


def _checked(record: Record, why_not: Callable[[Record], str | None], case_of: Callable[[Record], Case]) -> Case | str:
    """Return the step of a row; an empty accumulation is none."""
    given = record | {"grad_accum": record["grad_accum"] or "1"}
    by_time = record["source"].startswith(fsdp_qlora.SOURCE)
    if (fsdp_qlora.seconds_of(given) if by_time else number(given["tokens_per_s"])) is None:
        return "no time was recorded"
    if missing := [name for name in COUNTS if not is_count(given[name])]:
        return f"incomplete: {', '.join(missing)} is not a whole number"
    if given["method"] not in METHODS:
        return f"method {given['method']}, which no request has"
    return why_not(given) or case_of(given)


def _fms_why_not(record: Record) -> str | None:
    if record["method"] != "full" and not is_count(record["lora_rank"]):
        return "incomplete: lora_rank is not a whole number"
    if key_of(record["gpu"]) is None:
        return f"GPU not in the catalogue: {record['gpu']}"
    return None if _fms_config(record) else f"no config at hand for {record['model']}"


def _fms_config(record: Record) -> dict[str, Any] | None:
    """Return the config without how its weights are packed: as GPTQ packs them, they cost what nf4 costs."""
    config = fms.config_of(record["model"]) or config_of(record["model"])
    return config and {name: value for name, value in config.items() if name != "quantization_config"}


def _fms_case(record: Record) -> Case:
    request = Request.parse(fms.request_of(record) | {"config": _fms_config(record)})
    key = key_of(record["gpu"])
    assert key is not None
    tokens = request.micro_batch_size * request.gradient_accumulation_steps * request.sequence_length
    seconds = tokens / float(record["tokens_per_s"])
    return anatomy(read_config(request.config)), request, devices_of(key, request.world_size), seconds
