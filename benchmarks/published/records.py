"""One record of a file of published measurements: the columns of its header, and `key=value` notes."""

from __future__ import annotations

import csv
import math
import re
import sys
from pathlib import Path

Record = dict[str, str]

COLUMNS = (
    "source",
    "model",
    "params",
    "method",
    "lora_rank",
    "lora_targets",
    "optimizer",
    "precision",
    "seq_len",
    "micro_batch",
    "grad_accum",
    "grad_ckpt",
    "strategy",
    "gpu",
    "world_size",
    "peak_mem_gib",
    "mem_kind",
    "tokens_per_s",
    "mfu",
    "notes",
)


def read_records(path: Path) -> list[Record]:
    """Return the rows of a file; a column that the file or the row lacks is empty, one too many is left out."""
    csv.field_size_limit(sys.maxsize)
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        return [{name: (row.get(name) or "").strip() for name in COLUMNS} for row in csv.DictReader(file)]


def note(record: Record, key: str) -> str | None:
    """Return one `key=value` of a row's notes."""
    found = re.search(rf"\b{key}=([^;]*)", record["notes"])
    return found.group(1).strip() if found else None


def number(text: str) -> float | None:
    """Return a number above zero; None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def is_count(text: str) -> bool:
    """Whether a text is a whole number above zero, such as `2` or `2.0`."""
    value = number(text)
    return value is not None and value.is_integer()
