"""The counts of GPUs that are asked for, refused all at once where they are not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.errors import ExitCode, UserError
from trainwright.hardware.inventory import Device, Host
from trainwright.hardware.threads import usable_cores


@dataclass(frozen=True)
class AvailableDevices:
    """What a job can be spread over here: GPUs, or on a processor ranks, as many as it has cores."""

    devices: tuple[Device, ...]
    most: int

    @staticmethod
    def of(devices: tuple[Device, ...], host: Host) -> AvailableDevices:
        """Look at the devices that the job may use on a host."""
        cores = host.cores if isinstance(host.cores, int) else usable_cores()
        return AvailableDevices(devices, cores if devices[0].kind == "cpu" else len(devices))

    @property
    def noun(self) -> str:
        """What is counted, one of it."""
        return "rank" if self.kind == "cpu" else "GPU"

    @property
    def kind(self) -> str:
        """Kind of the devices."""
        return self.devices[0].kind

    def named(self, count: int) -> str:
        """Return a count with what is counted: `1 rank`, `2 GPUs`."""
        return f"{count} {self.noun}{'' if count == 1 else 's'}"

    def first(self, count: int) -> tuple[Device, ...]:
        """Return the devices of a run on `count` of them; a processor is one, whatever the ranks."""
        return self.devices if self.kind == "cpu" else self.devices[:count]

    def __str__(self) -> str:
        if self.kind == "cpu":
            return f"{self.devices[0].label}, {self.most} cores for as many ranks"
        return ", ".join(device.label for device in self.devices)


def counts_of(text: str) -> list[int]:
    """Return the counts in `1,2,4,8`, ascending and each once.

    Raises:
        UserError: one is no count, or there are fewer than two, which show no growth.
    """
    entries = text.replace(",", " ").split()
    wrong = [entry for entry in entries if not (entry.isascii() and entry.isdigit() and 1 <= len(entry) <= 6)]
    wrong += [entry for entry in entries if entry not in wrong and int(entry) < 1]
    hints = ["--gpus 1,2,4,8 measures one, two, four and eight GPUs"]
    if wrong:
        raise UserError(
            "`--gpus` takes counts of GPUs", problems=[f"`{entry}` is no count" for entry in wrong], hints=hints
        )
    counts = sorted({int(entry) for entry in entries})
    if len(counts) < 2:
        raise UserError("`--gpus` names fewer than two counts, and growth needs two", hints=hints)
    return counts


def usual_counts(available: AvailableDevices) -> list[int]:
    """Return 1, 2, 4, ... up to what there is, and all of it.

    Raises:
        UserError: there is only one.
    """
    if available.most < 2:
        raise UserError(
            f"there is {available.named(available.most)}, and growth needs two counts",
            hints=[f"there are: {available}"],
            exit_code=ExitCode.MISSING,
        )
    return sorted({2**power for power in range(available.most.bit_length())} | {available.most})


def require_available(counts: Sequence[int], available: AvailableDevices) -> None:
    """Refuse counts beyond what there is.

    Raises:
        UserError: with every such count, and what there is (exit code 4).
    """
    beyond = [count for count in counts if count > available.most]
    if not beyond:
        return
    within = [str(count) for count in counts if count <= available.most]
    raise UserError(
        f"--gpus asks for more {available.noun}s than there are",
        problems=[f"{available.named(count)} asked for, {available.most} can be used" for count in beyond],
        hints=[f"there are: {available}", *([f"--gpus {','.join(within)}"] if len(within) > 1 else [])],
        exit_code=ExitCode.MISSING,
    )
