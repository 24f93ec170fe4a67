"""A few kilobytes of parquet that stand for gigabytes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

LONG = "a" * (1 << 20)

READ = """
import resource, sys
from trainwright.errors import UserError
from trainwright.train.data.problems import Problems
from trainwright.train.data.rows import read_rows
from trainwright.train.data.sources import find_source
import pyarrow.parquet

start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
problems, rows = Problems(sys.argv[1], ()), 0
try:
    for _ in read_rows(find_source(sys.argv[1], "train"), problems):
        rows += 1
    problems.raise_if_any()
except UserError as error:
    print(error.render(), file=sys.stderr)
print(rows, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) // 1024)
"""


def _one_text_in_every_row(count: int) -> Any:
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([LONG]))


def _many_rows(path: Path) -> None:
    pq.write_table(pa.table({"text": _one_text_in_every_row(4096)}), path, compression="zstd")


def _one_row_of_many(path: Path) -> None:
    row = pa.ListArray.from_arrays(pa.array([0, 4096], pa.int32()), _one_text_in_every_row(4096))
    pq.write_table(pa.table({"text": row}), path, compression="zstd")


def _one_row(path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array(["a" * (1 << 29)])}), path, compression="zstd", use_dictionary=False)


CASES: dict[str, tuple[Callable[[Path], None], int, str]] = {
    # 4 GiB of texts that are each within the limit: all of them are rows.
    "one text in every row": (_many_rows, 4096, ""),
    "a row of one text many times": (_one_row_of_many, 0, "row 1: the row has 4,096 MiB, more than 8 MiB"),
    "a row that unpacks": (_one_row, 0, "column text unpacks from "),
}


@pytest.mark.parametrize("case", CASES)
def test_harm_15_a_small_parquet_of_large_rows_is_read_within_bounds(case: str, tmp_path: Path) -> None:
    """Less than 256 MiB, whatever it stands for; what is too large is named, as in JSON Lines."""
    make, rows, complaint = CASES[case]
    path = tmp_path / "rows.parquet"
    make(path)
    assert path.stat().st_size < 64_000
    done = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, text=True, check=True)
    read, grown_mib = map(int, done.stdout.split())
    assert read == rows, done.stderr
    assert grown_mib < 256
    assert complaint in done.stderr and (not complaint or str(path) in done.stderr)
