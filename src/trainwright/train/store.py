"""torch's key-value store, by which ranks find each other, on one address alone, and loopback for all that listens."""

from __future__ import annotations

import datetime
import os
import socket

import torch.distributed as dist

LOOPBACK = "127.0.0.1"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def keep_to_loopback() -> None:
    """Have gloo and NCCL listen on loopback alone, unless the user has named them an interface."""
    for name in _INTERFACES:
        os.environ.setdefault(name, "lo0" if os.uname().sysname == "Darwin" else "lo")


def open_store(address: str, port: int, timeout: datetime.timedelta) -> dist.TCPStore:
    """Return a store that this process holds and that listens on `address` alone; port 0 is any that is free.

    Raises:
        OSError: the address is not one of this machine, or the port is taken.
    """
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listening = socket.create_server(place[:2], family=family)
    # TCPStore listens on all interfaces (torch 2.13), unless it is handed a socket that is bound already.
    return dist.TCPStore(
        address,
        listening.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
