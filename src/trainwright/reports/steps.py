"""metrics.jsonl from its first line to its last: the curves by step, and what they come to."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from trainwright.reports.curves import Curve
from trainwright.runs import records
from trainwright.runs.values import column, number, whole

FIGURES: Final = ("loss", "learning_rate", "tokens_per_s", "step_s", "grad_norm", "memory_gib")

AT_ONCE: Final = 4096
MOST_NAMED: Final = 10


@dataclass
class Steps:
    """What the records of steps and evaluations say; of steps that were done twice, the second time counts."""

    curves: dict[str, Curve] = field(default_factory=lambda: {name: Curve() for name in (*FIGURES, "eval_loss")})
    last: dict[str, Any] = field(default_factory=dict)
    """The newest record of a step."""
    not_finite: list[int] = field(default_factory=list)
    """Steps whose loss was recorded as null, the first of them."""
    eval_loss: float | None = None
    done_again: int = 0
    tokens: float = 0.0
    tokens_in_s: float = 0.0
    warm_step_s: array[float] = field(default_factory=lambda: array("d"))
    """The time of each step but an attempt's first, which loads kernels and fills caches."""
    _step: int | None = None
    _attempts: set[int | None] = field(default_factory=set)

    @property
    def median_step_s(self) -> float | None:
        """Median time of a step."""
        return median(self.warm_step_s) if self.warm_step_s else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all ranks over the time of the steps that they took."""
        return self.tokens / self.tokens_in_s if self.tokens_in_s else None

    @property
    def steps_per_epoch(self) -> int | None:
        """As the newest record tells; within an epoch whose last step is a smaller one, the quotient is a bit less."""
        step, epoch = whole(self.last, "step"), number(self.last, "epoch")
        return math.ceil(round(step / epoch, 6)) if step is not None and epoch else None

    def _add_steps(self, batch: Sequence[dict[str, Any]]) -> None:
        """Take steps of one attempt that follow each other."""
        self._go_back_to(batch[0]["step"])
        self.last, self._step = batch[-1], batch[-1]["step"]
        columns = {name: column(batch, name) for name in FIGURES}
        numbers = [record["step"] for record in batch]
        for name, values in columns.items():
            at = [step for step, value in zip(numbers, values, strict=True) if value is not None]
            self.curves[name].extend(at, [value for value in values if value is not None])
        lost = [record["step"] for record in batch if "loss" in record and record["loss"] is None]
        self.not_finite = [*self.not_finite, *lost][:MOST_NAMED]
        attempt = whole(batch[0], "attempt")
        warm_up = 0 if attempt in self._attempts else 1
        self._attempts.add(attempt)
        self._add_pace(columns["step_s"][warm_up:], columns["tokens_per_s"][warm_up:])

    def _go_back_to(self, first: int) -> None:
        """Forget the steps that are done again from here on."""
        if self._step is not None and first <= self._step:
            self.done_again += self._step - first + 1
            for curve in self.curves.values():
                curve.rewind(first)

    def _add_pace(self, steps_s: Sequence[float | None], rates: Sequence[float | None]) -> None:
        for step_s, rate in zip(steps_s, rates, strict=True):
            if step_s is not None:
                self.warm_step_s.append(step_s)
                if rate is not None:
                    self.tokens += rate * step_s
                    self.tokens_in_s += step_s

    def _add_evaluation(self, record: dict[str, Any], step: int) -> None:
        loss = number(record, "loss")
        if loss is not None:
            self.curves["eval_loss"].rewind(step)
            self.curves["eval_loss"].add(step, loss)
            self.eval_loss = loss


def read_steps(path: Path, passed_over: records.PassedOver | None = None) -> Steps:
    """Read all records; lines that are cut short or make no sense are passed over, and counted."""
    steps, passed_over = Steps(), passed_over or records.PassedOver()
    batch: list[dict[str, Any]] = []
    for record in records.read(path, passed_over):
        kind, step = record.get("kind"), whole(record, "step")
        if step is None or kind not in ("train", "eval"):
            passed_over.count += 1
            continue
        if batch and (
            kind == "eval"
            or len(batch) >= AT_ONCE
            or step <= batch[-1]["step"]
            or record.get("attempt") != batch[-1].get("attempt")
        ):
            steps._add_steps(batch)
            batch = []
        if kind == "train":
            batch.append(record)
        else:
            steps._add_evaluation(record, step)
    if batch:
        steps._add_steps(batch)
    return steps
