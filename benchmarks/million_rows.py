"""Memory and time of a million rows: `python benchmarks/million_rows.py [--rows N] [--json PATH]`.

Makes a parquet file of short questions and answers, prepares it in one process, and reads every sample in shuffled
order in another. Prints the peak resident memory of each, and writes the figures with the versions they were taken on.
Everything lies in a temporary folder that is removed at the end.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from trainwright.job.schema import Job

LIMIT_GIB = 1.5
_ROWS_AT_ONCE = 50_000
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvwz" for vowel in "aeiou"]
_PEAK = """
import pathlib, re, resource, sys, time

def peak_kib():
    if sys.platform == "linux":
        # Not ru_maxrss: a child begins with the peak of the process that started it (exec_mmap, fs/exec.c).
        return int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "darwin" else 1)
"""
_PREPARE = """
from trainwright.train.prepare import main
code = main(sys.argv[1:])
print(peak_kib(), time.process_time())
sys.exit(code)
"""
_READ = """
import json
import torch, transformers
from trainwright.train.data.dataset import TokenDataset
from trainwright.train.data.order import epoch_order
prepared = json.load(open(sys.argv[1] + "/prepared.json"))
data = TokenDataset(prepared["train"]["cache"])
tokens = sum(len(data[int(index)]["input_ids"]) for index in epoch_order(42, 0, len(data)))
assert tokens == prepared["train"]["tokens"], (tokens, prepared["train"]["tokens"])
print(peak_kib(), time.process_time())
"""


def main() -> int:
    """Measure, print a table, write JSON; 1 if a process took more memory than the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, default=Path("million_rows.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run, rows = Path(folder), Path(folder) / "rows.parquet"
        _write_rows(rows, arguments.rows)
        (run / "resolved.json").write_text(_job(rows, run).model_dump_json(), encoding="utf-8")
        processes = {
            "prepare (trains the tokenizer too)": _measure(_PREPARE, run),
            "prepare again (nothing to do)": _measure(_PREPARE, run),
            "read every sample, shuffled": _measure(_READ, run),
        }
        train = json.loads((run / "prepared.json").read_text())["train"]
        file_mib = rows.stat().st_size / 2**20
    print(f"{arguments.rows:,} rows, parquet {file_mib:.0f} MiB, {train['tokens']:,} tokens")
    print(f"{'process':<36}{'peak resident':>16}{'time':>10}{'CPU time':>12}")
    for name, (gib, seconds, cpu_s) in processes.items():
        print(f"{name:<36}{gib:>12.2f} GiB{seconds:>8.1f} s{cpu_s:>10.1f} s")
    figures = {
        "rows": arguments.rows,
        "parquet_mib": round(file_mib, 1),
        "tokens": train["tokens"],
        "limit_gib": LIMIT_GIB,
        "processes": {
            name: {"peak_resident_gib": round(gib, 3), "seconds": round(seconds, 1), "cpu_seconds": round(cpu_s, 1)}
            for name, (gib, seconds, cpu_s) in processes.items()
        },
        "versions": {
            "python": platform.python_version(),
            **{
                name: importlib.metadata.version(name)
                for name in ("torch", "transformers", "tokenizers", "pyarrow", "numpy")
            },
        },
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
    }
    arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(f"written to {arguments.json}")
    return int(any(gib > LIMIT_GIB for gib, _, _ in processes.values()))


def _write_rows(path: Path, rows: int) -> None:
    schema = pa.schema([("question", pa.string()), ("answer", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, _ROWS_AT_ONCE):
            numbers = range(start, min(start + _ROWS_AT_ONCE, rows))
            questions = [
                f"{_name(n)} sells {n} apples and {n % 97} pears to {_name(n * 7)}. How many?" for n in numbers
            ]
            answers = [f"{_name(n)} sells {n} + {n % 97} = {n + n % 97} pieces of fruit in all." for n in numbers]
            writer.write_table(pa.table({"question": questions, "answer": answers}, schema=schema))


def _name(number: int) -> str:
    """Return one of 421,875 names, so that the tokenizer finds as many words to learn as it has room for."""
    size = len(_SYLLABLES)
    return "".join(_SYLLABLES[number // size**place % size] for place in range(3)).capitalize()


def _job(rows: Path, run: Path) -> Job:
    return Job.model_validate(
        {
            "name": "million-rows",
            "model": {"from_scratch": {"architecture": "llama"}, "tokenizer": {"vocab_size": 8192}},
            "data": {"path": str(rows), "cache_dir": str(run / "cache"), "max_length": 256},
        }
    )


def _measure(program: str, run: Path) -> tuple[float, float, float]:
    """Run a program on the run folder; return its peak resident memory in GiB, its seconds, and its CPU seconds."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _PEAK + program, str(run)], stdout=subprocess.PIPE, text=True, check=True
    )
    peak_kib, cpu_s = map(float, done.stdout.split())
    return peak_kib / 2**20, time.monotonic() - began, cpu_s


if __name__ == "__main__":
    sys.exit(main())
