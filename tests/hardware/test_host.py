"""The host, its limits and its processor, on file systems laid out like those of Linux."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil
import pytest

from trainwright.errors import ExitCode, UserError
from trainwright.hardware.host import apple_gpu, processor, read_host
from trainwright.hardware.local import local_inventory
from trainwright.hardware.precision import choose_precision
from trainwright.hardware.reading import GIB, NOT_AVAILABLE


def lay_out(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_limits_the_host_is_the_machine(tmp_path: Path) -> None:
    host, notes = read_host(tmp_path)
    assert host.memory_total_bytes == psutil.virtual_memory().total
    assert notes == ()
    assert host.numa_nodes is NOT_AVAILABLE


def test_a_batch_jobs_limit_is_the_hosts_memory(tmp_path: Path) -> None:
    """A job that asked for --mem has that much, whatever the node holds; file cache can be given back."""
    step = tmp_path / "sys/fs/cgroup/slurm/job_7/step_0"
    step.mkdir(parents=True)
    lay_out(tmp_path, proc__self__cgroup="0::/slurm/job_7/step_0\n")
    (step.parent / "memory.max").write_text(str(2 * GIB))
    (step.parent / "memory.current").write_text(str(GIB))
    (step.parent / "memory.stat").write_text(f"anon 5\ninactive_file {GIB // 2}\n")
    (step / "memory.max").write_text("max")
    (step / "cpu.max").write_text("100000 100000")
    host, notes = read_host(tmp_path)
    assert host.memory_total_bytes == 2 * GIB
    assert host.memory_available_bytes == min(GIB + GIB // 2, psutil.virtual_memory().available)
    assert host.cores == 1
    assert any("limits host memory to 2.0 GiB" in note for note in notes)


def test_the_first_version_of_control_groups_counts_too(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/memory"
    group.mkdir(parents=True)
    lay_out(tmp_path, proc__self__cgroup="9:memory:/docker/abc\n1:name=systemd:/x\n")
    (group / "memory.limit_in_bytes").write_text(str(3 * GIB))
    (group / "memory.usage_in_bytes").write_text(str(GIB))
    host, _ = read_host(tmp_path)
    assert host.memory_total_bytes == 3 * GIB


@pytest.mark.parametrize(
    ("cpuinfo", "precision"),
    [
        ("model name\t: Intel(R) Xeon(R)\nflags\t\t: fpu avx512f amx_bf16 avx512_bf16\n", "bf16"),
        ("model name\t: AMD EPYC 7763\nflags\t\t: fpu avx2 fma\n", "fp32"),
        ("Features\t: fp asimd bf16 svebf16\n", "bf16"),
        ("", "fp32"),
    ],
)
def test_the_processors_instructions_decide_its_precision(tmp_path: Path, cpuinfo: str, precision: str) -> None:
    lay_out(tmp_path, proc__cpuinfo=cpuinfo)
    host, _ = read_host(tmp_path)
    assert choose_precision(processor(host, tmp_path)).value == precision


def test_numa_nodes_are_counted(tmp_path: Path) -> None:
    nodes = tmp_path / "sys/devices/system/node"
    for name in ("node0", "node1", "node10", "possible"):
        (nodes / name).mkdir(parents=True)
    assert read_host(tmp_path)[0].numa_nodes == 3


def test_a_mac_is_found_by_its_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """S4-01: a Mac with Apple silicon trains on its GPU."""
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    host, _ = read_host(tmp_path)
    device = apple_gpu(host)
    assert device is not None
    assert (device.kind, device.memory_total_bytes) == ("mps", host.memory_total_bytes)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert apple_gpu(host) is None


def test_a_container_without_nvml_shows_what_the_driver_says(tmp_path: Path) -> None:
    """NVIDIA_DRIVER_CAPABILITIES=compute: CUDA works, the management library is missing."""
    text = "Model: \t\t NVIDIA GeForce RTX 3090\nIRQ:   \t\t 31\nGPU UUID: \t GPU-aaaa-bbbb\nDevice Minor: \t 0\n"
    folder = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text(text)
    inventory = local_inventory(environment={}, root=tmp_path)
    [device] = inventory.devices
    assert (device.kind, device.name, device.uuid) == ("cuda", "NVIDIA GeForce RTX 3090", "GPU-aaaa-bbbb")
    assert (device.cuda_ordinal, device.memory_total_bytes) == (0, NOT_AVAILABLE)
    assert choose_precision(device).value == "bf16"
    assert any("NVIDIA_DRIVER_CAPABILITIES=compute,utility" in note for note in inventory.notes)


def test_a_kind_that_is_not_there_is_a_missing_thing(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        local_inventory("cuda", environment={}, root=tmp_path)
    assert caught.value.exit_code == ExitCode.MISSING
    assert "NVIDIA driver" in caught.value.render()


def test_the_cpu_can_be_asked_for(tmp_path: Path) -> None:
    assert [device.kind for device in local_inventory("cpu", root=tmp_path).devices] == ["cpu"]
