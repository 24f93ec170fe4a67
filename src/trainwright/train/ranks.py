"""The ranks of a run: how they find each other and what they agree on."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainwright.errors import ExitCode, UserError
from trainwright.train.store import LOOPBACK, keep_to_loopback, open_store

COLLECTIVE_TIMEOUT_S = 1800
"""The shortest time-out of collectives."""
LONGEST_SECTIONS = 12
"""And in time-outs of the job, twice what the launcher allows a save: it knows sections, and is to judge first."""
MEETING_TIMEOUT_S = 300


@dataclass(frozen=True)
class Ranks:
    """All ranks as seen from one of them; alone, nothing is communicated."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.rank == 0

    @property
    def backend(self) -> str:
        """Library that carries the collectives, as the live group names it."""
        return str(dist.get_backend()) if dist.is_initialized() else "none"

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise sum over ranks, in double precision."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        summed: list[float] = tensor.tolist()
        return summed

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of ranks, on all of them; as JSON, so nothing is unpickled."""
        if self.world_size == 1:
            return [value]
        written = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        length = torch.tensor([len(written)], device=self.device)
        lengths = [torch.zeros_like(length) for _ in range(self.world_size)]
        dist.all_gather(lengths, length)
        longest = max(int(one) for one in lengths)
        padded = torch.nn.functional.pad(written, (0, longest - len(written)))
        everyone = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(everyone, padded)
        return [json.loads(bytes(one[: int(length)].tolist())) for one, length in zip(everyone, lengths, strict=True)]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            self.sum([0.0])


def open_group(
    *, rank: int, world_size: int, device: torch.device, meeting_file: Path, hang_timeout_s: float = 0.0
) -> Ranks:
    """Join the process group: NCCL between GPUs, gloo between CPU processes; alone there is none.

    `meeting_file` belongs to one attempt and says where the ranks meet. Unless torchrun's store is named there already,
    rank 0 takes a free port from the kernel and writes it there, so that no port is guessed and no two runs meet.

    Raises:
        UserError: the other ranks did not appear in time.
    """
    if world_size == 1:
        return Ranks(rank, world_size, device)
    timeout = datetime.timedelta(seconds=MEETING_TIMEOUT_S)
    if rank == 0 and not meeting_file.exists():
        store = _store_on_loopback(timeout, meeting_file)
    else:
        address, port = _wait_for_meeting(meeting_file)
        store = dist.TCPStore(address, port, world_size, timeout=timeout)
    on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if on_this_machine == world_size:
        keep_to_loopback()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        # torchrun's store may have served an earlier attempt.
        store=dist.PrefixStore(meeting_file.parent.name, store),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=max(COLLECTIVE_TIMEOUT_S, LONGEST_SECTIONS * hang_timeout_s)),
        device_id=device if device.type == "cuda" else None,
    )
    return Ranks(rank, world_size, device)


def _store_on_loopback(timeout: datetime.timedelta, meeting_file: Path) -> dist.TCPStore:
    store = open_store(LOOPBACK, 0, timeout)
    draft = meeting_file.with_suffix(".tmp")
    draft.write_text(json.dumps({"address": LOOPBACK, "port": store.port}))
    draft.replace(meeting_file)
    return store


def _wait_for_meeting(meeting_file: Path) -> tuple[str, int]:
    deadline_s = time.monotonic() + MEETING_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            meeting = json.loads(meeting_file.read_text())
        except FileNotFoundError:
            time.sleep(0.02)
        else:
            return str(meeting["address"]), int(meeting["port"])
    raise UserError(f"rank 0 did not appear within {MEETING_TIMEOUT_S} s", exit_code=ExitCode.FAILED)
