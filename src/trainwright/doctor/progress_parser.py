"""What lines of progress tell beside the loss (times, waiting, use of the GPU), and the slowness that it shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from trainwright.doctor.literals import Sought

_NUMBER: Final = r"\W{0,3}(?P<value>\d+(?:\.\d+)?) ?(?P<unit>ms|s)?\b"
_STEP_TIME: Final = re.compile(rf"(?:\b[Tt]ime|batch_time|step_time|iter_time){_NUMBER}")
_DATA_TIME: Final = re.compile(rf"\b[Dd]ata(?:_time|_wait)?{_NUMBER}")
_UTILISATION: Final = re.compile(r"\b(?:gpu|GPU)[_ -]?(?:util\w*|load)\W{0,3}(?P<value>\d+(?:\.\d+)?) ?%")
_MODEL_FLOPS: Final = re.compile(r"\b(?:mfu|MFU)\W{0,3}(?P<value>\d+(?:\.\d+)?) ?%")
_DEEPSPEED: Final = Sought.of(
    r"\bfwd(?:_microstep)?: (?P<forward>[\d.]+) .*?\bbwd(?:_microstep)?: (?P<backward>[\d.]+) "
    r".*\bbwd_allreduce(?:_microstep)?: (?P<communication>[\d.]+) .*\bstep(?:_microstep)?: (?P<step>[\d.]+)"
)
FEWEST: Final = 3
FEWEST_OF_DATA: Final = 5
DATA_SHARE: Final = 0.5
COMMUNICATION_SHARE: Final = 0.4
LITTLE_DATA: Final = 0.2
LITTLE_USE: Final = 0.4
LITTLE_MODEL_FLOPS: Final = 0.02
"""Of the GPU's peak: eager launches of tiny kernels reach a tenth of what the smallest useful models do."""


@dataclass
class Meters:
    """Seconds of steps and of their data, milliseconds apart; shares are at most 1."""

    steps_s: list[float] = field(default_factory=list)
    data_s: list[float] = field(default_factory=list)
    communication: list[float] = field(default_factory=list)
    utilisation: list[float] = field(default_factory=list)
    model_flops: list[float] = field(default_factory=list)

    def read(self, line: str) -> None:
        """Take what one line tells."""
        if "ata" in line and (step := _STEP_TIME.search(line)) and (data := _DATA_TIME.search(line)):
            self.steps_s.append(_seconds(step))
            self.data_s.append(_seconds(data))
        if times := _DEEPSPEED.search(line):
            whole = sum(float(times[name]) for name in ("forward", "backward", "step"))
            self.communication.append(float(times["communication"]) / max(whole, 1e-9))
        if "%" not in line:
            return
        if share := _UTILISATION.search(line):
            self.utilisation.append(float(share["value"]) / 100)
        if share := _MODEL_FLOPS.search(line):
            self.model_flops.append(float(share["value"]) / 100)

    def slowness(self) -> Iterator[tuple[str, str]]:
        """Yield the causes that are told, with their figures."""
        waits = sum(self.data_s) / max(sum(self.steps_s), 1e-9)
        if len(self.steps_s) >= FEWEST_OF_DATA and waits > DATA_SHARE:
            yield "data-starvation", f"{waits:.0%} of a step is spent waiting for data ({len(self.steps_s)} records)"
        if len(self.communication) >= FEWEST and median(self.communication) > COMMUNICATION_SHARE:
            share = median(self.communication)
            yield "communication-bound", f"{share:.0%} of a step is the reduction of gradients"
        if waits < LITTLE_DATA and not self.communication:
            if len(self.utilisation) >= FEWEST_OF_DATA and median(self.utilisation) < LITTLE_USE:
                yield "batch-too-small", f"the GPU is used {median(self.utilisation):.0%}, and data are there in time"
            elif len(self.model_flops) >= FEWEST_OF_DATA and median(self.model_flops) < LITTLE_MODEL_FLOPS:
                peak = f"{median(self.model_flops):.1%} of the GPU's peak are reached"
                yield "batch-too-small", f"{peak}, and data are there in time"


def _seconds(time: re.Match[str]) -> float:
    return float(time["value"]) / (1000 if time["unit"] == "ms" else 1)
