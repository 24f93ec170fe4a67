"""This machine through NVML: a real nvidia-ml-py on a stand-in library, one machine for each thing that goes wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import nvml_standin as machines
import pytest
from nvml_standin import NvmlStandin

PROGRAM = """
import json, sys
from trainwright.errors import UserError
from trainwright.hardware.local import local_inventory
from trainwright.hardware.selection import cuda_environment, select_devices
inventory = local_inventory("auto")
answer = inventory.to_json() | {"usable": [d.index for d in inventory.usable]}
if len(sys.argv) > 1:
    try:
        chosen = select_devices(inventory, json.loads(sys.argv[1]))
        answer |= {"chosen": [d.index for d in chosen], "environment": cuda_environment(chosen)}
    except UserError as error:
        answer |= {"error": error.render(), "exit_code": int(error.exit_code)}
print(json.dumps(answer))
"""


def read(nvml: NvmlStandin, machine: str | None, request: object = None, **variables: str) -> dict[str, Any]:
    arguments = [] if request is None else [json.dumps(request)]
    done = nvml.python(machine, "-c", PROGRAM, *arguments, **variables)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_two_a100_and_two_v100_are_read_whole(nvml: NvmlStandin) -> None:
    """S0-08: the mixed node of the guide, with links, NUMA nodes, precision's capability and who uses what."""
    found = read(nvml, machines.TWO_A100_TWO_V100)
    first, second, third, _ = found["devices"]
    assert [device["index"] for device in found["devices"]] == [0, 1, 2, 3]
    assert [device["cuda_ordinal"] for device in found["devices"]] == [0, 1, 2, 3]
    assert (first["catalog_key"], third["catalog_key"]) == ("a100-40gb", "v100-32gb")
    assert first["memory_total_bytes"] == 40960 * 2**20
    assert first["memory_free_bytes"] == (40960 - 31000) * 2**20
    assert (first["compute_capability"], third["compute_capability"]) == ([8, 0], [7, 0])
    assert second["nvlink"] == {"links": 12, "generation": 3, "peers": [0]}
    assert third["nvlink"] == {"links": 6, "generation": 2, "peers": [3]}
    assert (first["numa_node"], third["numa_node"]) == (0, 1)
    assert (first["pcie_generation"], first["pcie_width"]) == (4, 16)
    assert second["processes"] == []
    assert [process["pid"] for process in first["processes"]] == [4000001]
    assert first["processes"][0]["memory_bytes"] == 30500 * 2**20
    assert first["processes"][0]["user"] is None, "a process id of another namespace has no known user"
    assert found["driver_version"] == "550.54.15"
    assert found["cuda_version"] == [12, 4]


def test_the_user_of_a_gpu_is_named(nvml: NvmlStandin) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        found = read(nvml, f"gpu NVIDIA_A100-SXM4-80GB cc=8.0 mem=81920 used=99 proc={sleeper.pid}")
    finally:
        sleeper.communicate(b"\n")
    [process] = found["devices"][0]["processes"]
    assert process["command"].startswith("python")
    assert process["user"]
    assert process["memory_bytes"] is None, "NVML did not say how much it uses"


def test_an_idle_gpu_shows_the_link_it_can_reach(nvml: NvmlStandin) -> None:
    found = read(nvml, "gpu NVIDIA_GeForce_RTX_4090 cc=8.9 mem=24564 util=0 pciegen=4 pciewidth=8")
    assert (found["devices"][0]["pcie_generation"], found["devices"][0]["pcie_width"]) == (4, 8)


@pytest.mark.parametrize("machine", [machines.GPU_1_LOST, machines.GPU_1_DIES_WHILE_READ])
def test_a_lost_gpu_is_said_and_the_others_stay(nvml: NvmlStandin, machine: str) -> None:
    found = read(nvml, machine, [2])
    assert [device["index"] for device in found["devices"]] == [0, 2]
    assert [device["cuda_ordinal"] for device in found["devices"]] == [0, 1]
    assert found["environment"]["CUDA_VISIBLE_DEVICES"] == found["devices"][1]["uuid"]
    [note] = [note for note in found["notes"] if "lost" in note]
    assert note.startswith("GPU 1 is lost")


def test_a_missing_reading_is_null_and_never_zero(nvml: NvmlStandin) -> None:
    [device] = read(nvml, machines.NOTHING_READABLE)["devices"]
    missing = (
        "memory_total_bytes",
        "memory_free_bytes",
        "compute_capability",
        "pcie_generation",
        "pcie_width",
        "numa_node",
        "processes",
    )
    assert [name for name in missing if device[name] is not None] == []
    assert device["name"] == "NVIDIA GeForce RTX 3090"
    assert device["catalog_key"] == "rtx-3090"


def test_a_total_of_zero_is_a_missing_reading(nvml: NvmlStandin) -> None:
    [device] = read(nvml, "gpu NVIDIA_GeForce_RTX_3090 cc=8.6 mem=0")["devices"]
    assert device["memory_total_bytes"] is None


def test_mig_instances_stand_in_place_of_their_gpu(nvml: NvmlStandin) -> None:
    """MIG User Guide, "CUDA Device Enumeration": one instance, and no other GPU beside it."""
    found = read(nvml, machines.MIG)
    large, small, whole = found["devices"]
    assert large["name"] == "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
    assert large["memory_total_bytes"] == 19968 * 2**20
    assert large["mig"] == {"parent_index": 0, "gpu_instance": 1, "compute_instance": 0, "compute_slices": 3}
    assert [large["cuda_ordinal"], small["cuda_ordinal"], whole["cuda_ordinal"]] == [0, None, None]
    assert any("MIG mode" in note for note in found["notes"])


@pytest.mark.parametrize(("place", "index"), [(1, 0), (2, 1)])
def test_another_mig_instance_or_gpu_can_be_asked_for(nvml: NvmlStandin, place: int, index: int) -> None:
    """X-15: MIG ids and UUIDs are accepted like indices."""
    uuid = read(nvml, machines.MIG)["devices"][place]["uuid"]
    found = read(nvml, machines.MIG, uuid)
    assert found["chosen"] == [index]
    assert found["environment"]["CUDA_VISIBLE_DEVICES"] == uuid


def test_two_mig_instances_for_one_job_are_refused(nvml: NvmlStandin) -> None:
    uuids = [device["uuid"] for device in read(nvml, machines.MIG)["devices"][:2]]
    assert "one MIG instance" in read(nvml, machines.MIG, uuids)["error"]


def test_mig_mode_without_an_instance_leaves_the_cpu_and_says_how_to_change_it(nvml: NvmlStandin) -> None:
    found = read(nvml, machines.MIG_WITHOUT_INSTANCES)
    assert [device["kind"] for device in found["devices"]] == ["cpu"]
    assert any("-mig 0" in note for note in found["notes"])


def test_no_driver_leaves_the_cpu_and_says_so(nvml: NvmlStandin) -> None:
    found = read(nvml, None)
    assert [device["kind"] for device in found["devices"]] == ["cpu"]
    assert any("driver is not loaded" in note for note in found["notes"])


def test_no_library_leaves_the_cpu_and_says_so(nvml: NvmlStandin, tmp_path: Any) -> None:
    found = read(nvml, machines.FOUR_A100, LD_LIBRARY_PATH=str(tmp_path))
    assert [device["kind"] for device in found["devices"]] == ["cpu"]
    assert any("libnvidia-ml.so.1" in note for note in found["notes"])


def test_a_driver_updated_under_the_kernel_says_to_restart(nvml: NvmlStandin) -> None:
    assert any("restart the machine" in note for note in read(nvml, machines.LIBRARY_NEWER_THAN_DRIVER)["notes"])


def test_a_machine_with_a_driver_and_no_gpu_uses_the_cpu(nvml: NvmlStandin) -> None:
    found = read(nvml, machines.NO_GPU)
    assert [device["kind"] for device in found["devices"]] == ["cpu"]
    assert found["driver_version"] == "550.54.15"


def test_gpus_of_another_job_are_named_as_closed(nvml: NvmlStandin) -> None:
    """A batch system's device limits: CUDA counts from 0 over the GPUs that are open, NVML over all."""
    found = read(nvml, machines.GPUS_0_AND_1_CLOSED, CUDA_VISIBLE_DEVICES="0,1")
    assert [(device["index"], device["cuda_ordinal"]) for device in found["devices"]] == [(2, 0), (3, 1)]
    assert sum("not open to this process" in note for note in found["notes"]) == 2


def test_an_unknown_model_is_said_and_still_usable(nvml: NvmlStandin) -> None:
    found = read(nvml, machines.UNKNOWN_MODEL)
    assert found["usable"] == [0]
    assert any("NVIDIA X9000 is not in the catalogue" in note for note in found["notes"])


def test_names_cannot_send_escape_sequences(nvml: NvmlStandin) -> None:
    [device] = read(nvml, "gpu A100\x1b[2J cc=8.0 mem=40960")["devices"]
    assert device["name"] == "A100?[2J"


def test_hidden_gpus_are_listed_and_not_given_out(nvml: NvmlStandin) -> None:
    """S1-11: the choice by CUDA_VISIBLE_DEVICES; both numbers are shown."""
    found = read(nvml, machines.FOUR_A100, "auto", CUDA_VISIBLE_DEVICES="3,1")
    assert [device["cuda_ordinal"] for device in found["devices"]] == [None, 1, None, 0]
    assert found["chosen"] == [3, 1]
    assert "CUDA_VISIBLE_DEVICES=3,1 hides 2 of 4 GPUs" in found["notes"]


@pytest.mark.parametrize("request_", ["2,3", "2 3", [2, 3], ["2", "3"]])
def test_every_spelling_of_a_choice_means_the_same(nvml: NvmlStandin, request_: object) -> None:
    """X-15, S4-10: `--gpus 2,3`, `--gpu_ids 2 3` and CUDA_VISIBLE_DEVICES=2,3."""
    asked = read(nvml, machines.FOUR_A100, request_)
    by_variable = read(nvml, machines.FOUR_A100, "auto", CUDA_VISIBLE_DEVICES="2,3")
    assert asked["chosen"] == by_variable["chosen"] == [2, 3]
    assert asked["environment"] == by_variable["environment"]


def test_a_number_is_how_many_and_text_is_which(nvml: NvmlStandin) -> None:
    assert read(nvml, machines.FOUR_A100, 2)["chosen"] == [0, 1]
    assert read(nvml, machines.FOUR_A100, "2")["chosen"] == [2]
    assert read(nvml, machines.FOUR_A100, "0")["chosen"] == [0]


def test_a_choice_that_cannot_be_had_names_all_that_is_wrong_and_what_there_is(nvml: NvmlStandin) -> None:
    found = read(nvml, machines.FOUR_A100, "0,7,1,1,GPU-ffff", CUDA_VISIBLE_DEVICES="1,2")
    for problem in ("`0` is hidden by CUDA_VISIBLE_DEVICES", "`7` names no GPU", "`1` is there twice", "`GPU-ffff`"):
        assert problem in found["error"]
    assert "hint: there are: 1 (NVIDIA A100-SXM4-80GB), 2 (NVIDIA A100-SXM4-80GB)" in found["error"]
    assert found["exit_code"] == 4


def test_more_gpus_than_there_are(nvml: NvmlStandin) -> None:
    assert "5 GPUs asked for, 4 can be used" in read(nvml, machines.FOUR_A100, 5)["error"]


def test_unlike_gpus_without_pci_order_are_warned_about(nvml: NvmlStandin) -> None:
    """With FASTEST_FIRST, CUDA's default, the numbers of a mixed node are not those of nvidia-smi."""
    mixed = machines.TWO_A100_TWO_V100
    assert any("CUDA_DEVICE_ORDER" in note for note in read(nvml, mixed)["notes"])
    assert not any("CUDA_DEVICE_ORDER" in note for note in read(nvml, mixed, CUDA_DEVICE_ORDER="PCI_BUS_ID")["notes"])
    assert not any("CUDA_DEVICE_ORDER" in note for note in read(nvml, machines.FOUR_A100)["notes"])
    assert read(nvml, mixed, "auto")["environment"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
