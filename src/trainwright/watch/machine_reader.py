"""Reads this machine into a View, without a run: GPUs and host, judged by the guides' thresholds."""

from __future__ import annotations

import time
from pathlib import Path

from trainwright.job.schema import AlertsSection
from trainwright.watch.alerts.active_alerts import ActiveAlerts, Alert, standing_after
from trainwright.watch.alerts.machine import machine_conditions
from trainwright.watch.gpus import GpuReader
from trainwright.watch.node import NodeReader
from trainwright.watch.samples import Sample
from trainwright.watch.view import View

FIRST_RATES_S = 0.2
"""What a first look waits for the load of the cores and the rates."""


class MachineReader:
    """This machine, as long as NVML's session is open; `once` is for a single look."""

    def __init__(self, gpus: GpuReader, *, once: bool) -> None:
        self._node = NodeReader(Path.cwd(), None, gpus)
        self._node.read()
        time.sleep(FIRST_RATES_S)
        self._first: Sample | None = None
        self._standing, self._alerts = ActiveAlerts(patient=not once), list[Alert]()

    def read(self) -> View:
        """Return the machine as it is now."""
        sample = self._node.read()
        self._first = self._first or sample
        changes = self._standing.update(sample.time_s, machine_conditions(sample, self._first, AlertsSection()))
        self._alerts = standing_after([*self._alerts, *changes])
        return View(time_s=sample.time_s, nodes=(sample,), alerts=tuple(self._alerts))
