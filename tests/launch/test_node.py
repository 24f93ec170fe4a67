"""What the launcher of one node tells torchrun, and where the nodes of an attempt meet."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trainwright.errors import UserError
from trainwright.launch.multi_node import reserve_port
from trainwright.launch.node import NodeLaunch, address_towards, torchrun_options
from trainwright.launch.supervision import rank_environment
from trainwright.plan.layout import Layout

LAUNCH = NodeLaunch(
    nodes=2,
    ranks_per_node=4,
    address="10.0.0.7",
    port=41000,
    rendezvous_id="run-3-ab12",
    command=("-m", "trainwright.train.under_torchrun", "/runs/a b"),
    environment={"OMP_NUM_THREADS": "4"},
    run="/runs/a b",
    attempt=3,
)


def test_every_node_is_told_the_same_but_for_who_holds_the_meeting() -> None:
    """T-07, S4-49: number 0 hosts, each names its own address, and a restart is left to a new attempt."""
    first, second = (torchrun_options(LAUNCH, node, f"10.0.0.{7 + node}") for node in (0, 1))
    differing = [(one, other) for one, other in zip(first, second, strict=True) if one != other]
    assert differing == [("--node-rank=0", "--node-rank=1"), ("--local-addr=10.0.0.7", "--local-addr=10.0.0.8")]
    assert {"--nnodes=2", "--nproc-per-node=4", "--max-restarts=0"} <= set(first)
    assert {"--master-addr=10.0.0.7", "--master-port=41000"} <= set(first)
    assert first[-3:] == list(LAUNCH.command)


def test_what_is_written_for_the_nodes_is_what_they_read(tmp_path: Path) -> None:
    LAUNCH.write(tmp_path / "nodes.json")
    assert NodeLaunch.read(tmp_path / "nodes.json") == LAUNCH


def test_ranks_on_other_machines_get_the_settings_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans count on them, and ssh hands no environment on."""
    layout = Layout(
        device="cuda",
        visible_devices="0",
        ranks=2,
        strategy="ddp",
        precision="bf16",
        offload="none",
        global_batch_size=2,
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        eval_batch_size=1,
        gradient_checkpointing=False,
    )
    assert "PYTORCH_ALLOC_CONF" not in rank_environment(layout, 1, 1)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert rank_environment(layout, 1, 1)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_the_port_of_a_meeting_is_given_to_nobody_else() -> None:
    """S11: kept from other choices of the kernel, and free for who says SO_REUSEADDR, as the store of torch does."""
    kept, port = reserve_port("127.0.0.1")
    with kept:
        others = [reserve_port("127.0.0.1") for _ in range(200)]
        assert port not in {other for _, other in others}
        for other, _ in others:
            other.close()
        with pytest.raises(OSError, match="in use"), socket.socket() as unasked:
            unasked.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)):
            socket.create_connection(("127.0.0.1", port), timeout=10).close()


def test_an_address_is_that_of_the_way_to_the_other_node() -> None:
    """The host name is not asked, which often stands for loopback or for nothing."""
    assert address_towards("127.0.0.1").startswith("127.")
    with pytest.raises(UserError, match="cannot be reached"):
        address_towards("no-such-node.invalid")


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("192.0.2.77", "192.0.2.77 is not an address of this machine"),
        ("no-such-node.invalid", "no-such-node.invalid is not an address of this machine"),
    ],
)
def test_harm_01_node_0_listens_on_its_own_address_or_says_why_not(address: str, why: str) -> None:
    """The store is on one address, so one that node 0 does not have is an error and no reason to listen on all."""
    place = ["--nnodes=2", "--nproc-per-node=1", "--node-rank=0", f"--master-addr={address}", "--no-python", "true"]
    launcher = [sys.executable, "-m", "trainwright.train.launcher", "torchrun"]
    done = subprocess.run([*launcher, *place], capture_output=True, text=True, timeout=120)
    assert (done.returncode, "Traceback" in done.stderr) == (4, False), done.stderr
    assert why in done.stderr
