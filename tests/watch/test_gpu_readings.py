"""GPU readings against the stand-in NVML: right where there are any, and missing where there are none."""

from __future__ import annotations

import json
from typing import Any

import nvml_standin as machines
import pytest
from nvml_standin import NvmlStandin

SAMPLES = """
import dataclasses, json, time
from trainwright.watch.gpus import GpuReader
with GpuReader() as reader:
    first = reader.read()
    time.sleep(0.1)
    print(json.dumps({"note": reader.note, "gpus": [dataclasses.asdict(gpu) for gpu in reader.read()]}))
"""
# nvitop's own reading of the same machine; NA is not a number.
NVITOP = """
import json
from nvitop import Device
number = lambda value: value if isinstance(value, (int, float)) else None
print(json.dumps([
    {"memory_used_bytes": number(device.memory_used()), "memory_total_bytes": number(device.memory_total()),
     "utilization_pct": number(device.gpu_utilization()), "temperature_c": number(device.temperature()),
     "power_mw": number(device.power_usage()), "sm_clock_mhz": number(device.clock_infos().sm)}
    for device in Device.all()
]))
"""


def read_gpus(nvml: NvmlStandin, machine: str | None) -> dict[str, Any]:
    done = nvml.python(machine, "-c", SAMPLES)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_mixed_node_at_work(nvml: NvmlStandin) -> None:
    """Done-when 4 of issue 7: two A100 and two V100, one of them throttled."""
    gpus = read_gpus(nvml, machines.TWO_A100_TWO_V100_AT_WORK)["gpus"]
    assert [gpu["utilization_pct"] for gpu in gpus] == [97, 96, 31, 88]
    assert [gpu["temperature_c"] for gpu in gpus] == [64, 91, 58, 71]
    assert [gpu["memory_used_bytes"] // 2**20 for gpu in gpus] == [31000, 39000, 16000, 24000]
    assert [gpu["power_w"] for gpu in gpus] == [310, 395, 120, 250]
    assert [gpu["throttle_reasons"] for gpu in gpus] == [
        [],
        ["hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown"],
        [],
        [],
    ]
    assert gpus[1]["sm_clock_mhz"] == 705
    assert gpus[0]["processes"] == [{"pid": 4000001, "memory_bytes": 30500 * 2**20}]


def test_traffic_is_a_rate_of_counters_and_else_the_drivers_own(nvml: NvmlStandin) -> None:
    gpus = read_gpus(nvml, machines.TWO_A100_TWO_V100_AT_WORK)["gpus"]
    # The stand-in counts 1 MiB over PCIe and 2 MiB over NVLink from one reading to the next.
    assert gpus[0]["nvlink_received_bytes_s"] == pytest.approx(2 * gpus[0]["pcie_received_bytes_s"], rel=0.01)
    assert 0 < gpus[0]["pcie_received_bytes_s"] <= 2**20 / 0.1
    assert gpus[1]["pcie_received_bytes_s"] == 0
    assert gpus[2]["pcie_received_bytes_s"] == 1000 * 1024, "no counters: nvmlDeviceGetPcieThroughput, in KiB/s"
    assert gpus[2]["nvlink_received_bytes_s"] is None


def test_a_lost_gpu_is_said_to_be_lost_and_the_others_are_read(nvml: NvmlStandin) -> None:
    for machine in (machines.GPU_1_LOST, machines.GPU_1_DIES_WHILE_READ):
        gpus = read_gpus(nvml, machine)["gpus"]
        assert [gpu["lost"] for gpu in gpus] == [False, True, False]
        assert gpus[1]["utilization_pct"] is None and gpus[1]["memory_used_bytes"] is None
        assert gpus[2]["memory_total_bytes"] == 81920 * 2**20


def test_mig_instances_are_read_and_their_gpu_has_no_utilisation(nvml: NvmlStandin) -> None:
    gpus = read_gpus(nvml, machines.MIG)["gpus"]
    assert [instance["memory_used_bytes"] // 2**20 for instance in gpus[0]["instances"]] == [25, 12]
    assert gpus[0]["utilization_pct"] is None
    assert gpus[1]["instances"] is None and gpus[1]["utilization_pct"] == 0


def test_nothing_readable_is_nothing_and_never_zero(nvml: NvmlStandin) -> None:
    (gpu,) = read_gpus(nvml, machines.NO_LOAD_READABLE)["gpus"]
    known = {name for name, value in gpu.items() if value not in (None, False)}
    assert known <= {"index", "name", "uuid", "sm_clock_max_mhz"}
    assert gpu["utilization_pct"] is None and gpu["xid_total"] is None


def test_an_xid_is_counted_once(nvml: NvmlStandin) -> None:
    first, second = read_gpus(nvml, "gpu A xid=79\ngpu B\n")["gpus"]
    assert (first["xid_total"], first["last_xid"]) == (1, 79)
    assert (second["xid_total"], second["last_xid"]) == (0, None)


def test_without_a_driver_it_says_so(nvml: NvmlStandin) -> None:
    found = read_gpus(nvml, None)
    assert found["gpus"] == [] and "Driver Not Loaded" in found["note"]


@pytest.mark.parametrize("machine", ["TWO_A100_TWO_V100_AT_WORK", "NO_LOAD_READABLE"])
def test_nvitop_reads_the_same_figures(nvml: NvmlStandin, machine: str) -> None:
    """Done-when 4 of issue 7."""
    text = getattr(machines, machine)
    ours = read_gpus(nvml, text)["gpus"]
    done = nvml.python(text, "-c", NVITOP)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout)
    assert len(theirs) == len(ours)
    for gpu, other in zip(ours, theirs, strict=True):
        power_mw = None if gpu["power_w"] is None else 1000 * gpu["power_w"]
        names = ("memory_used_bytes", "memory_total_bytes", "utilization_pct", "temperature_c", "sm_clock_mhz")
        if gpu["memory_total_bytes"] is None:
            # nvitop takes a GPU that does not tell its memory for one that shares the host's, and shows that.
            names = names[2:]
        assert {name: gpu[name] for name in names} == {name: other[name] for name in names}
        assert power_mw == other["power_mw"]
