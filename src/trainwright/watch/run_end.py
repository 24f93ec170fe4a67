"""Tells a run's end to its command and webhook: `python -m trainwright.watch.run_end RUN_DIR LAUNCHER_PID`.

Its standard input has the job's alerts in a line, and, once the run has ended, the message (null: there is nothing to
tell). Where it ends without one, the launcher was killed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

from trainwright.job.schema import AlertsSection
from trainwright.launch.processes import STOP_SIGNALS
from trainwright.runs.folder import RunFolder
from trainwright.watch.alerts.active_alerts import Alert
from trainwright.watch.alerts.delivery import open_delivery


def launcher_lost(folder: RunFolder, pid: int) -> Alert:
    """Return the message that the launcher, of which only the number is left, ended without one."""
    now_s, name = time.time(), folder.path.name
    return Alert(
        time_s=now_s,
        state="fired",
        rule="run_failed",
        subject=name,
        severity="warning",
        what=f"run {name} failed: its launcher (pid {pid}) was killed, or broke, before it could say why",
        advice="the same command goes on from the newest checkpoint",
        figures={},
        threshold={},
        since_s=now_s,
        node=socket.gethostname(),
        attempt=folder.attempt or None,
    )


def main() -> int:
    """Wait for the end, and tell it."""
    folder, pid = RunFolder(sys.argv[1]), int(sys.argv[2])
    # What asks the launcher and its ranks to stop does not end what is to tell that they did.
    for number in (*STOP_SIGNALS, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    alerts = sys.stdin.readline()
    if not alerts:
        return 0
    delivery = open_delivery(AlertsSection.model_validate_json(alerts), _say, os.environ)
    message = sys.stdin.read()
    alert = json.loads(message) if message else launcher_lost(folder, pid).to_json()
    if alert is not None:
        delivery.send(Alert.from_json(alert))
    delivery.close()
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
