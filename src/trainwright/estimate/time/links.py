"""What connects the ranks: the slowest link of a ring through all of them, from an Inventory's devices.

Rates are those at which a ring of NCCL moves data in each direction (nccl-tests' bus bandwidth).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Final

from trainwright.estimate.time.rates import RateRange
from trainwright.hardware.catalog import GpuSpec
from trainwright.hardware.inventory import Device
from trainwright.hardware.reading import NotAvailable

_GB: Final = 1e9
# One link and direction, as NCCL expects of it (`src/graph/topo.h` of NCCL 2.28: SM60_NVLINK_BW and so on), in GB/s.
_NVLINK: Final = {(6, 0): 18.0, (7, 0): 20.0, (8, 0): 20.0, (8, 6): 12.0, (9, 0): 20.6, (10, 0): 40.1}
# 16 lanes of PCI Express 3 (`PCI_BW`, the same file); each generation doubles.
_PCIE_3_X16: Final = 12.0
# Several cards below the CPUs: all_reduce_perf shows 12.7 GB/s for 8 RTX 4090 with PCIe 4 and peer access, and 25 for
# cards on one switch (github.com/tinygrad/open-gpu-kernel-modules pull request 22, issue 36); AMD's fabric 16 (topo.h).
# Where a virtual machine or ACS sends peers' traffic to the root complex (NCCL user guide, troubleshooting, "PCI
# Access Control Services"), it is as slow as through host memory.
_PEERS_OVER_CPU: Final = RateRange(0.13, 0.65, 1.0)
# GeForce cards have no peer access ("GeForce cards do not support P2P", NVIDIA in nccl-tests issue 287): every byte is
# written to host memory and read from there. Two RTX 2080 Ti below one PCIe 3 switch move 6.1 GB/s, both directions
# added (p2pBandwidthLatencyTest without P2P, Anthony-Hoo.github.io, AutoDL test), two RTX 3070 Ti 4.9 to 7.5
# (forum.level1techs.com/t/185531). It is one path through the host, which all cards of a node share.
_THROUGH_HOST: Final = RateRange(4.9, 6.1, 20.0)
# Servers have a path for each card: two A40 with PCIe 4 in an EPYC server move 20 GB/s, both directions added, when
# peer access is switched off (NCCL_P2P_DISABLE=1; nccl-tests issue 74).
_THROUGH_SERVER: Final = RateRange(0.13, 20 / 2 / 24, 0.5)
# Out of a node, where nobody says: a ring leaves a node once, over all of its network cards. HGX boards have one for
# each GPU (8 x 200 Gbit/s in DGX A100, 8 x 400 in DGX H100, 4 x 100 in DGX-1 with V100), other nodes one or two of 25
# to 200 Gbit/s. Of it, 0.85 to 0.95 are data.
_NODE_NETWORK_GBIT: Final = {"Volta": 400.0, "Ampere": 1600.0, "Hopper": 3200.0, "Blackwell": 3200.0}
_PLAIN_NETWORK: Final = RateRange(25 / 8 * _GB * 0.9, 100 / 8 * _GB * 0.9, 200 / 8 * _GB * 0.9)
# Start of one operation of NCCL, and of each step of its ring: `src/graph/tuning.cc`, baseLat and hwLat (NVLink 0.6 to
# 3.4, PCIe 1.0 to 5.7, network 2.7 to 14 microseconds), and the launch of its kernel.
_START_S: Final = 20e-6
_HOP_S: Final = {"none": 0.0, "NVLink": 1e-6, "PCIe": 3e-6, "host memory": 8e-6, "network": 14e-6}
# Thread blocks of NCCL, each of which takes a multiprocessor from the computation while data travel: two rings for each
# of 12 links (NVLink), two to four channels over PCIe (`src/graph/connect.cc`, `src/graph/search.cc`).
_CHANNELS: Final = {"none": 0, "NVLink": 24, "PCIe": 4, "host memory": 4, "network": 16}
# What the memory of a host passes to and from its GPUs: two sockets with 8 channels of DDR4-3200 have 2 x 204 GB/s, of
# which copies through it reach a quarter.
_HOST_MEMORY: Final = 100 * _GB


@dataclass(frozen=True, slots=True)
class Link:
    """The slowest link of a ring: what it is, bytes a second and direction, and what an operation takes to start.

    `ring_s` is the time of one round of the ring with nothing to send, `tree_s` that of a tree up and down, which NCCL
    takes for an all-reduce where it is shorter.
    """

    kind: str
    rate: RateRange
    ring_s: float
    tree_s: float
    host: RateRange
    """From one GPU to host memory while all of its node do so, bytes a second."""

    @property
    def channels(self) -> int:
        """Multiprocessors that communication takes."""
        return _CHANNELS[self.kind]

    def passed_s(self, moved_bytes: float, ranks: int, operations: int, rate: float) -> float:
        """Seconds of an all-gather or reduce-scatter of `moved_bytes` in so many operations."""
        return moved_bytes * (ranks - 1) / ranks / rate + operations * (_START_S + self.ring_s)

    def reduced_s(self, moved_bytes: float, ranks: int, operations: int, rate: float) -> float:
        """Seconds of an all-reduce."""
        start_s = _START_S + min(2 * self.ring_s, self.tree_s)
        return 2 * moved_bytes * (ranks - 1) / ranks / rate + operations * start_s


def link_of(
    devices: Sequence[Device], gpus: Sequence[GpuSpec], network_gb_s: float | None = None, *, peer_access: bool = True
) -> Link:
    """The slowest link of a ring through these devices, and their way to host memory.

    `network_gb_s` is what a node can send to another, in 10^9 bytes a second; None: assumed, with a wide range. Without
    `peer_access` no GPU reaches the memory of another.
    """
    on_node = Counter(device.node for device in devices)
    nodes, most = len(on_node), max(on_node.values())
    lanes = min(_pcie(device, gpu) for device, gpu in zip(devices, gpus, strict=True))
    kind, inside = _inside(devices, gpus, most, lanes, peer_access)
    between = _network(gpus, network_gb_s) if nodes > 1 else inside
    out_of_node = between.usual < inside.usual
    hop_s, far_s = _HOP_S[kind], _HOP_S["network"]
    return Link(
        kind="network" if out_of_node else kind,
        rate=between if out_of_node else inside,
        ring_s=(len(devices) - nodes) * hop_s + (nodes - 1) * far_s,
        tree_s=2 * ((most - 1) * hop_s + log2(nodes) * far_s),
        host=RateRange(0.6, 0.85, 1.0) * min(lanes, _HOST_MEMORY / most),
    )


def _inside(
    devices: Sequence[Device], gpus: Sequence[GpuSpec], on_node: int, lanes: float, peer_access: bool
) -> tuple[str, RateRange]:
    """Kind and rate of the slowest link within a node."""
    if on_node == 1:
        return "none", RateRange(*(float("inf"),) * 3)
    if peer_access and all(_has_nvlink(device, on_node) for device in devices):
        rate = min(_nvlink(device, gpu) for device, gpu in zip(devices, gpus, strict=True))
        return "NVLink", RateRange(0.8, 0.95, 1.0) * rate
    if any("GeForce" in gpu.name for gpu in gpus):
        shared = _THROUGH_HOST * (_GB / on_node)
        return "host memory", RateRange(*(min(lanes, end) for end in (shared.slow, shared.usual, shared.fast)))
    if not peer_access:
        return "host memory", _THROUGH_SERVER * lanes
    return "PCIe", _PEERS_OVER_CPU * lanes


def _has_nvlink(device: Device, on_node: int) -> bool:
    """Whether it reaches all the others of its node; a bridge joins two."""
    link = device.nvlink
    return link is not None and not isinstance(link, NotAvailable) and len(link.peers) >= on_node - 1


def _nvlink(device: Device, gpu: GpuSpec) -> float:
    assert device.nvlink is not None and not isinstance(device.nvlink, NotAvailable)
    return device.nvlink.links * _NVLINK.get(gpu.compute_capability or (0, 0), 12.0) * _GB


def _pcie(device: Device, gpu: GpuSpec) -> float:
    """One direction of its slot, bytes a second."""
    generation, width = (
        known if isinstance(read, NotAvailable) else read
        for read, known in (
            (device.pcie_generation, gpu.pcie_generation or 3),
            (device.pcie_width, gpu.pcie_width or 16),
        )
    )
    return _PCIE_3_X16 * _GB * float(2 ** (generation - 3)) * width / 16


def _network(gpus: Sequence[GpuSpec], network_gb_s: float | None) -> RateRange:
    """Rate of the way out of a node."""
    if network_gb_s is not None:
        return RateRange(0.7, 0.85, 0.95) * (network_gb_s * _GB)
    known = [_NODE_NETWORK_GBIT[gpu.architecture] for gpu in gpus if _is_board(gpu)]
    if len(known) < len(gpus):
        return _PLAIN_NETWORK
    # A cluster may have fewer cards a node than the reference design: a quarter of its rate is the low end.
    return RateRange(0.25, 0.85, 0.95) * (min(known) / 8 * _GB)


def _is_board(gpu: GpuSpec) -> bool:
    return gpu.nvlink is not None and gpu.nvlink.form == "board" and gpu.architecture in _NODE_NETWORK_GBIT
