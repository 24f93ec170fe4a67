"""Measures each configuration in processes of its own, with a limit on the time of each and of all together."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from configurations import Configuration

HERE = Path(__file__).parent
START_S = 60.0
"""What importing the libraries and building the model may take, besides a configuration's own limit."""
READY = max(1, (os.cpu_count() or 1) // 4)
"""Configurations whose processes make themselves ready while another measures, which must not feel it."""


class Workers:
    """The processes of one group, which measure one configuration; steps.py is their end of it."""

    def __init__(self, configuration: Configuration, device: str) -> None:
        self.ranks = configuration.ranks
        self._folder = tempfile.TemporaryDirectory()
        self._errors = Path(self._folder.name) / "stderr"
        meeting = Path(self._folder.name) / "meeting"
        command = [sys.executable, str(HERE / "steps.py"), device, str(meeting), configuration.name]
        self._processes = [self._start(command, rank) for rank in range(self.ranks)]
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def measure(self, limit_s: float) -> dict[str, Any]:
        """Return the figures, or why there are none."""
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write("go\n")
                process.stdin.flush()
            except BrokenPipeError:
                break  # it has ended, as the silence of rank 0 will tell
        try:
            answer = self._answers.get(timeout=limit_s)
        except queue.Empty:
            return {"failed": f"no answer within {limit_s:.0f} s"}
        return json.loads(answer) if answer else {"failed": f"the process ended: {self._last_words()}"}

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._folder.cleanup()

    def _start(self, command: list[str], rank: int) -> subprocess.Popen[str]:
        group = {"RANK": str(rank), "WORLD_SIZE": str(self.ranks), "LOCAL_RANK": "0"}
        with self._errors.open("a") as errors:
            return subprocess.Popen(
                command,
                env=environment() | group,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def _listen(self) -> None:
        stdout = self._processes[0].stdout
        assert stdout is not None
        for line in stdout:
            self._answers.put(line)
        self._answers.put("")

    def _last_words(self) -> str:
        lines = self._errors.read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"


def environment() -> dict[str, str]:
    """Return the environment of processes that import the package from this checkout, without a network."""
    paths = [str(HERE.parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


def measure_all(
    configurations: Sequence[Configuration],
    *,
    device: str,
    out: Path,
    predictions: Path | None,
    budget_s: float,
    limit_s: float,
) -> dict[str, Any]:
    """Measure until all is done or the budget spent; `out` is written anew after every configuration.

    A configuration is not begun when the budget is spent, and one under way is broken off then.
    """
    began_s = time.monotonic()
    results: dict[str, Any] = {
        "schema_version": 1,
        "date": date.today().isoformat(),
        "budget_s": budget_s,
        "predictions_sha256": hashlib.sha256(predictions.read_bytes()).hexdigest() if predictions else None,
        "constants": constants(device, min(budget_s, 2 * START_S)),
        "rows": [],
        "not_reached": [configuration.name for configuration in configurations],
    }
    ready: dict[str, Workers] = {}
    try:
        for number, configuration in enumerate(configurations):
            left_s = budget_s - (time.monotonic() - began_s)
            if left_s <= 0:
                break
            for near in configurations[number : number + 1 + READY]:
                if near.name not in ready and not _missing(near):
                    ready[near.name] = Workers(near, device)
            row_began_s = time.monotonic()
            if missing := _missing(configuration):
                row: dict[str, Any] = {"skipped": f"{' and '.join(missing)} is not installed"}
            else:
                workers = ready[configuration.name]
                row = workers.measure(min(limit_s + START_S, left_s))
                workers.close()
            if "failed" in row and time.monotonic() - began_s >= budget_s:
                break
            row["wall_s"] = round(time.monotonic() - row_began_s, 2)
            results["rows"].append({"name": configuration.name, **row})
            results["not_reached"].remove(configuration.name)
            results["elapsed_s"] = round(time.monotonic() - began_s, 1)
            _write(out, results)
            print(_line(configuration, row), file=sys.stderr, flush=True)
    finally:
        for workers in ready.values():
            workers.close()
    results["elapsed_s"] = round(time.monotonic() - began_s, 1)
    _write(out, results)
    return results


def _missing(configuration: Configuration) -> list[str]:
    """Return the libraries that it needs and are not installed."""
    return [library for library in configuration.needs if importlib.util.find_spec(library) is None]


def constants(device: str, limit_s: float) -> dict[str, Any]:
    """Return what constants.py finds, in a process that has done nothing else."""
    command = [sys.executable, str(HERE / "constants.py"), device]
    try:
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer within {limit_s:.0f} s"}
    if done.returncode != 0:
        return {"failed": (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:300]}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _write(path: Path, results: dict[str, Any]) -> None:
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(results, indent=1) + "\n")
    draft.replace(path)


def _line(configuration: Configuration, row: dict[str, Any]) -> str:
    why = row.get("failed") or row.get("skipped")
    if why is not None:
        return f"{configuration.name}: {why}"
    memory = row["allocated_bytes"] or row["resident_bytes"]
    return f"{configuration.name}: {memory / 2**30:.3f} GiB, {row['step_s_median']:.3f} s a step ({row['wall_s']} s)"
