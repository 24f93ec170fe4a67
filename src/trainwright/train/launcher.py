"""A launcher whose ranks meet on one address alone: `python -m trainwright.train.launcher NAME OPTIONS...`.

NAME is torchrun, accelerate or deepspeed, and OPTIONS are what it takes by itself; of torchrun's for the rendezvous,
`--node-rank`, `--master-addr`, `--master-port` and `--rdzv-id` count. On one node nothing listens but on loopback.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Final

import torch.distributed.run as torchrun

from trainwright.errors import ExitCode, UserError
from trainwright.train.meeting import BACKEND
from trainwright.train.store import LOOPBACK, keep_to_loopback, open_store

USUAL_PORT = 29500
STORE_TIMEOUT = datetime.timedelta(minutes=30)
_run = torchrun.run


def _run_meeting_here(options: argparse.Namespace) -> None:
    """Run torchrun with this program's rendezvous, whatever it would have taken."""
    several = torchrun.parse_min_max_nnodes(options.nnodes)[1] > 1
    address, port = (options.master_addr, options.master_port or USUAL_PORT) if several else (LOOPBACK, 0)
    if not several:
        keep_to_loopback()
    elif options.node_rank == 0:
        _require_own_address(address)
    options.standalone, options.rdzv_backend = False, BACKEND
    options.rdzv_endpoint = f"{address}:{port}"
    options.rdzv_conf = f"rank={options.node_rank}"
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # Under nohup; torchrun would take the signal up again and end its ranks when the terminal is closed.
        options.signals_to_handle = ",".join(name for name in options.signals_to_handle.split(",") if name != "SIGHUP")
    _run(options)


def _require_own_address(address: str) -> None:
    """Raise UserError where node 0 could not listen on this address, or the other nodes would not reach it there.

    The store listens on nothing else, and /etc/hosts often gives a machine's own name a loopback address.
    """
    problem, found = "", ""
    try:
        found = str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
        with socket.socket(socket.AF_INET6 if ":" in found else socket.AF_INET) as probe:
            probe.bind((found, 0))
    except OSError as error:
        problem = f"{address} is not an address of this machine: {error.strerror or error}"
    if found and address not in (found, "localhost") and ipaddress.ip_address(found).is_loopback:
        problem = f"{address} is {found} on this machine, which the other nodes do not reach"
    if problem:
        raise UserError(
            problem,
            hints=["name node 0 by its address on the nodes' network (`ip address` shows it)"],
            exit_code=ExitCode.MISSING,
        )


def run_torchrun(options: Sequence[str]) -> None:
    """Run torchrun to its end.

    Raises:
        ChildFailedError: a rank failed.
    """
    torchrun.run = _run_meeting_here
    torchrun.main(list(options))


def run_accelerate(options: Sequence[str]) -> None:
    """Run `accelerate launch` to its end, which runs torchrun in this process."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    torchrun.run = _run_meeting_here
    launch_command(launch_command_parser().parse_args(list(options)))


def run_deepspeed(options: Sequence[str]) -> None:
    """Run `deepspeed` on this machine to its end; its ranks find the store of this process, and open none."""
    from deepspeed.launcher.runner import main as deepspeed

    keep_to_loopback()
    store = open_store(LOOPBACK, 0, STORE_TIMEOUT)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(True)
    deepspeed([f"--master_addr={LOOPBACK}", f"--master_port={store.port}", *options])


LAUNCHERS: Final[dict[str, Callable[[Sequence[str]], None]]] = {
    "torchrun": run_torchrun,
    "accelerate": run_accelerate,
    "deepspeed": run_deepspeed,
}


if __name__ == "__main__":
    try:
        LAUNCHERS[sys.argv[1]](sys.argv[2:])
    except UserError as error:
        print(error.render(), file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
