"""Where a rank's time goes, section by section, without ever waiting for the device."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

STAYS_KEPT = 300
"""Of each section, for its 99th percentile; sorting them once a second takes a fraction of a millisecond."""
SECTIONS = ("start", "data", "forward", "backward", "communication", "optimizer", "eval", "save", "other", "end")
"""`communication` is what the backward pass did not hide, and the agreement of ranks on each step; under sharding,
parameters are also gathered within forward and backward. `other` is everything between steps."""

SHORT = {"data", "forward", "backward", "communication", "optimizer", "other"}
"""Sections that change many times a second."""


class Sections:
    """The seconds of this rank in each section so far, which one it is in, and the last step that it did.

    On CUDA these are the device's seconds, between events in its stream: the host only queues kernels and would call
    its own waiting by the wrong name. Elsewhere they are the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._device = device
        self.seconds = dict.fromkeys(SECTIONS, 0.0)
        self.now = "start"
        self.moved = threading.Event()
        """Set whenever a section begins or ends that may last: who writes down where the rank is should do so now."""
        self.since_s = time.time()
        self.step, self.total_steps, self.steps_done = 0, 0, 0
        self._stays_s: dict[str, deque[float]] = {name: deque(maxlen=STAYS_KEPT) for name in SECTIONS}
        self._mark = self._moment()
        self._entered_s = time.perf_counter()
        self._pending: deque[tuple[str, Any, Any]] = deque()

    def enter(self, section: str) -> None:
        """Leave the present section for another; from here on time counts as that one's."""
        assert section in SECTIONS, section
        mark = self._moment()
        if self._on_cuda:
            self._pending.append((self.now, self._mark, mark))
        else:
            self.seconds[self.now] += mark - self._mark
        self._note_stay()
        lasting = not {self.now, section} <= SHORT
        self._mark, self.now = mark, section
        if lasting:
            self.moved.set()

    def gets_on(self) -> None:
        """Say that a section of many parts, such as an evaluation, is at the next of them and does not stand still."""
        self._note_stay()

    @contextmanager
    def within(self, section: str) -> Iterator[None]:
        """Count what runs inside as `section`'s, and go back to the present one."""
        outside = self.now
        self.enter(section)
        yield
        self.enter(outside)

    def communicate_after(self, loss: torch.Tensor) -> None:
        """Enter `communication` once the backward pass of `loss` has computed everything and only waits for others.

        DDP, FSDP2 and DeepSpeed queue their own waiting as a callback at the end of the pass; the one queued here, when
        the pass begins, comes before theirs (torch/csrc/autograd/engine.cpp, `exec_post_processing`: in their order).
        """
        engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        loss.register_hook(lambda _: engine.queue_callback(lambda: self.enter("communication")))

    def usual_longest_s(self) -> dict[str, float]:
        """Return the 99th percentile of the host's latest stays in each section that it has been in.

        Of the host even on CUDA: whether a rank hangs is a question of where its program stands.
        """
        stays_s = {name: sorted(stays.copy()) for name, stays in self._stays_s.items() if stays}
        return {name: stays[(99 * len(stays) - 1) // 100] for name, stays in stays_s.items()}

    def did_step(self, step: int) -> None:
        """Note that a step is done."""
        self.step = step
        self.steps_done += 1
        if self.steps_done == 1:
            self.moved.set()
        self.drain()

    def drain(self) -> None:
        """Take in what the device has finished meanwhile."""
        while self._pending and self._pending[0][2].query():
            section, began, ended = self._pending.popleft()
            self.seconds[section] += began.elapsed_time(ended) / 1000

    def _note_stay(self) -> None:
        entered_s = time.perf_counter()
        self._stays_s[self.now].append(entered_s - self._entered_s)
        self._entered_s, self.since_s = entered_s, time.time()

    def _moment(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
