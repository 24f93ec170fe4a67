"""Two launchers that know each other only by their file: what befalls one rank befalls the run as on one machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from two_ranks import write_two_ranks

from trainwright.runs.records import read

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from live_run import ledger

SEVERAL = Path(__file__).with_name("several_nodes.py")
PATIENCE_S = 400.0
pytestmark = pytest.mark.timeout(1800)


class TwoNodes:
    """A run of `several_nodes.py` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, write_two_ranks(folder)

    def start(self) -> subprocess.Popen[bytes]:
        """Start the run, or have it go on."""
        with (self.folder / "console").open("ab") as console:
            return subprocess.Popen(
                [sys.executable, str(SEVERAL), "job.yaml"],
                cwd=self.folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                stdout=console,
                stderr=console,
            )

    @property
    def said(self) -> str:
        """All that the starts so far have printed."""
        return (self.folder / "console").read_text(errors="replace")

    def wait_for(self, what: str, run: subprocess.Popen[bytes], condition: Callable[[], object]) -> None:
        """Wait for a condition while the run lives."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert run.poll() is None, f"ended with {run.returncode} before {what}:\n{self.said}"
            assert time.monotonic() < deadline_s, f"waited {PATIENCE_S:.0f} s for {what}:\n{self.said}"
            time.sleep(0.02)

    def ranks(self, run: subprocess.Popen[bytes]) -> dict[int, psutil.Process]:
        """Return the processes of the ranks by their number."""
        found = {}
        for process in psutil.Process(run.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "RANK" in (environment := process.environ()):
                    found[int(environment["RANK"])] = process
        return found

    def steps(self, attempt: int) -> int:
        """Return how many steps an attempt has done."""
        return sum(row["attempt"] == attempt for row in ledger(self.run_dir))


@pytest.mark.long
def test_a_rank_killed_on_one_node_is_named_and_the_run_goes_on_and_stops_as_one(tmp_path: Path) -> None:
    """S01, S10, G5: torchrun's own word for the failure is kept; both nodes' ranks stop at the same step, exit 75."""
    nodes = TwoNodes(tmp_path)
    run = nodes.start()
    try:
        nodes.wait_for("steps", run, lambda: nodes.steps(1) > 12)
        nodes.ranks(run)[1].kill()
        nodes.wait_for("the next attempt", run, lambda: nodes.steps(2) > 3)
        run.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE_S) == 75, nodes.said
    finally:
        run.kill()
    assert "rank 1 was ended by SIGKILL" in nodes.said
    failed = [event for event in read(nodes.run_dir / "events.jsonl") if event["event"] == "failed"]
    assert [(event["rank"], event["exit_code"]) for event in failed] == [(1, -9)]
    assert (nodes.run_dir / f"checkpoint-{ledger(nodes.run_dir)[-1]['step']}").is_dir()
    assert json.loads((nodes.run_dir / "logs" / "attempt_1" / "nodes.json").read_text())["nodes"] == 2


def test_launchers_that_cannot_start_their_ranks_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torchrun itself fails, its last line is in the error, and nothing is tried again in vain."""
    nodes = TwoNodes(tmp_path)
    # torchrun reads its options from such variables too.
    monkeypatch.setenv("PET_MONITOR_INTERVAL", "never")
    run = nodes.start()
    try:
        assert run.wait(PATIENCE_S) == 1, nodes.said
    finally:
        run.kill()
    assert "the ranks did not start" in nodes.said
    assert "never" in nodes.said
