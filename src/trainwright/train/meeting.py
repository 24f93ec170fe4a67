"""A rendezvous for torchrun in which nothing is unpickled, by a store on one address alone.

torchrun's usual one (c10d) opens its store on every interface and unpickles what it finds there (torch 2.13,
dynamic_rendezvous): whoever reaches the port runs code as the user. Here node 0 holds the store, on the address that
all nodes are told, and torchrun's agents put words and JSON there.
"""

from __future__ import annotations

import datetime
import socket
import time

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from trainwright.train.store import open_store

BACKEND = "trainwright"
"""The name that torchrun knows this rendezvous by."""
WAIT_FOR_NODES_S = 600
READ_TIMEOUT = datetime.timedelta(seconds=60)
POLL_S = 0.1


class Meeting(RendezvousHandler):
    """A rendezvous of a fixed number of nodes: node 0 opens the store, and each leaves word there that it has come."""

    def __init__(self, address: str, port: int, *, node: int, nodes: int, run_id: str) -> None:
        self._address, self._port = address, port
        self._node, self._nodes, self._run_id = node, nodes, run_id
        self._store: dist.TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store once every node has come.

        Raises:
            RendezvousTimeoutError: one has not come in time.
        """
        deadline_s = time.monotonic() + WAIT_FOR_NODES_S
        if self._store is None:
            self._store = self._open(deadline_s)
        store = dist.PrefixStore(self._run_id, self._store)
        store.set(f"node {self._node}", "here")
        for node in range(self._nodes):
            # Not by a call of the store's that waits: Ctrl+C would not be heard meanwhile.
            while not store.check([f"node {node}"]):
                _wait(deadline_s, f"node {node} of {self._nodes} has not come to {self._address}:{self._port}")
        self._store.set_timeout(READ_TIMEOUT)
        return RendezvousInfo(store, self._node, self._nodes, RendezvousStoreInfo(self._address, self._store.port))

    def _open(self, deadline_s: float) -> dist.TCPStore:
        timeout = datetime.timedelta(seconds=WAIT_FOR_NODES_S)
        if self._node == 0:
            return open_store(self._address, self._port, timeout)
        while not _answers(self._address, self._port):
            _wait(deadline_s, f"node 0 does not answer on {self._address}:{self._port}")
        return dist.TCPStore(self._address, self._port, is_master=False, timeout=timeout, wait_for_workers=False)

    def num_nodes_waiting(self) -> int:
        """Return 0, as none comes later; torchrun asks while its ranks run.

        Raises:
            RendezvousConnectionError: node 0 is gone.
        """
        assert self._store is not None
        try:
            self._store.check(["node 0"])
        except dist.DistError as error:
            raise RendezvousConnectionError(f"node 0 is gone from {self._address}:{self._port}") from error
        return 0

    @property
    def use_agent_store(self) -> bool:
        """The ranks use this store too, and open none of their own."""
        return True

    def get_backend(self) -> str:
        """Return the name of this rendezvous."""
        return BACKEND

    def get_run_id(self) -> str:
        """Return what keeps this attempt's words apart from others'."""
        return self._run_id

    def is_closed(self) -> bool:
        """Return False: it ends with its nodes."""
        return False

    def set_closed(self) -> None:
        """Leave it as it is, as it ends with its nodes."""

    def shutdown(self) -> bool:
        """Return that nothing is left to end."""
        return True


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=READ_TIMEOUT.total_seconds()).close()
    except OSError:
        return False
    return True


def _wait(deadline_s: float, lacking: str) -> None:
    if time.monotonic() > deadline_s:
        raise RendezvousTimeoutError(f"{lacking} within {WAIT_FOR_NODES_S} s")
    time.sleep(POLL_S)


def _meeting(parameters: RendezvousParameters) -> RendezvousHandler:
    address, port = parse_rendezvous_endpoint(parameters.endpoint, 0)
    return Meeting(
        address, port, node=int(parameters.config["rank"]), nodes=parameters.max_nodes, run_id=parameters.run_id
    )


rendezvous_handler_registry.register(BACKEND, _meeting)
