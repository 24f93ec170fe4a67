"""The checks before a run: of the machine, of a job, in short before every `train`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from trainwright.doctor.before import job as of_job
from trainwright.doctor.before import machine
from trainwright.doctor.before.check_order import short_check
from trainwright.doctor.before.check_result import Checked, lines_of
from trainwright.hardware.inventory import Device, DeviceProcess, Host, Inventory
from trainwright.hardware.reading import GIB
from trainwright.job.loading import load_job

A100 = {
    "kind": "cuda",
    "name": "NVIDIA A100-SXM4-80GB",
    "memory_total_bytes": 80 * GIB,
    "compute_capability": (8, 0),
    "processes": (),
    "catalog_key": "a100-80gb",
}
TORCH: dict[str, Any] = {"version": "2.13.0", "cuda": "12.6", "available": True, "nccl": "2.27.5"}
TORCH |= {"architectures": ["sm_80", "sm_90"], "warnings": []}


def gpus(count: int, **other: Any) -> Inventory:
    devices = [Device(index=index, cuda_ordinal=index, **{**A100, **other}) for index in range(count)]
    return Inventory(devices=tuple(devices), host=Host(), driver_version="550.90", cuda_version=(12, 4))


def torch_devices(count: int, *, peers: bool = True, capability: tuple[int, int] = (8, 0)) -> list[dict[str, Any]]:
    others = [[other for other in range(count) if other != index] if peers else [] for index in range(count)]
    return [{"name": "A100", "capability": list(capability), "peers": reach} for reach in others]


def bad(found: Any) -> list[tuple[str, str]]:
    return [(checked.status, checked.text) for checked in found if checked.status != "ok"]


def write_job(folder: Path, rows: list[str], **sections: Any) -> Path:
    (folder / "data.jsonl").write_text("\n".join(rows) + "\n")
    dimensions = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    job = {
        "name": "run",
        "output_dir": str(folder / "runs"),
        "model": {
            "from_scratch": {"architecture": "gpt2", "dimensions": dimensions},
            "tokenizer": {"vocab_size": 300},
        },
        "data": {"path": str(folder / "data.jsonl"), "max_length": 64, "cache_dir": str(folder / "cache")},
        "train": {"global_batch_size": 2},
        "resources": {"device": "cpu"},
        "tracking": [],
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps({**job, **sections}))
    return path


def test_torch_and_driver_have_to_match() -> None:
    """S3-32, S4-43: a CPU build, a CUDA too new for the driver, GPUs not seen, code for another architecture."""
    there = gpus(2)
    assert not bad(machine.torch_build(there, {**TORCH, "devices": torch_devices(2)}))
    for change, said in (
        ({"cuda": None}, "built without CUDA"),
        ({"cuda": "13.0", "devices": torch_devices(2)}, "the driver runs 12.4 at most"),
        ({"available": False, "warnings": ["driver too old"]}, "sees no GPU: driver too old"),
        ({"devices": torch_devices(1)}, "torch sees 1 GPUs, the driver 2"),
        ({"devices": torch_devices(2, capability=(12, 0))}, "no code for GPU 0 (A100, sm_120)"),
        ({"nccl": None, "devices": torch_devices(2)}, "without NCCL"),
        ({"error": "No module named 'torch'"}, "cannot be used"),
    ):
        found = [checked for checked in machine.torch_build(there, {**TORCH, **change}) if checked.status == "problem"]
        assert found and said in found[0].text, change
        assert found[0].fixes
    assert bad(machine.torch_build(there, {**TORCH, "devices": torch_devices(2, peers=False)}))[0][0] == "warning"


def test_gpus_that_others_use_and_gpus_of_several_models_are_told() -> None:
    """S1-24, S0-28."""
    assert not bad(machine.gpus(gpus(2)))
    used = (DeviceProcess(pid=77, user="ann", command="python", memory_bytes=9 * GIB),)
    assert bad(machine.gpus(gpus(1, processes=used)))[0][1].endswith("process 77 (python, ann) holds 9.0 GiB")
    unlike = Device(index=1, cuda_ordinal=1, **{**A100, "name": "Tesla V100", "memory_total_bytes": 32 * GIB})
    mixed = Inventory(devices=(*gpus(1).devices, unlike), host=Host(), driver_version="550.90", cuda_version=(12, 4))
    assert [status for status, _ in bad(machine.gpus(mixed))] == ["warning"]


def test_little_shared_memory_and_host_memory_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S2-19 and /dev/shm: what docker gives by default is too little."""
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: _usage(64 * 2**20))
    assert bad(machine.shared_memory(tmp_path))[0][0] == "warning"
    low = Inventory(devices=(), host=Host(memory_available_bytes=GIB))
    assert bad(machine.host_memory(low))[0][0] == "warning"


def test_versions_with_known_holes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """facts_reliability 5.1: floors, and releases that were malicious."""
    installed = {"torch": "2.9.1", "transformers": "5.2.0", "lightning": "2.6.3"}
    monkeypatch.setattr(machine, "_installed", installed.get)
    found = {checked.text.split()[0]: checked.status for checked in machine.versions()}
    assert found == {"torch": "warning", "transformers": "problem", "lightning": "problem"}
    monkeypatch.setattr(machine, "_installed", {"torch": "2.13.0", "transformers": "5.23.0"}.get)
    assert not list(machine.versions())


def test_a_cut_model_file_and_a_missing_shard_are_told(tmp_path: Path) -> None:
    """S4-43, offline files complete."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(16)
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    job = load_job(str(write_job(tmp_path, ["{}"], model={"name": str(tmp_path)}))).job
    assert "lacks model.safetensors" in bad(of_job.model_files(job))[0][1]
    weights.write_bytes(whole)
    assert not bad(of_job.model_files(job))
    for cut in (0, 5, 30, len(whole) - 1):
        weights.write_bytes(whole[:cut])
        assert bad(of_job.model_files(job))[0][0] == "problem", cut


def test_a_disk_without_room_for_two_checkpoints_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C08: by the predicted size, which is within a fifth of what the worker itself asks for."""
    job = load_job(str(write_job(tmp_path, ["{}"]))).job
    size = of_job.checkpoint_bytes(job)
    weights = 300 * 32 + 64 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32
    assert size == 12 * weights
    for free, status in ((size, "problem"), (3 * size, "warning"), (30 * size, None)):
        monkeypatch.setattr(of_job.shutil, "disk_usage", lambda path, free=free: _usage(free))
        assert [found[0] for found in bad(of_job.output(job))] == ([status] if status else [])


def test_a_job_is_checked_to_its_last_row_and_exits_1_on_problems(tmp_path: Path) -> None:
    """S4-43: the broken row is named with file and line; the document says the same as the lines."""
    rows = [json.dumps({"question": f"{number} + 1", "answer": str(number + 1)}) for number in range(40)]
    rows[32] = '{"question": "32 + 1'
    job = write_job(tmp_path, rows)
    done = _doctor(str(job), "--json")
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1 and document["problems"] == 1
    data = next(check for check in document["checks"] if check["check"] == "data")
    assert f"{tmp_path}/data.jsonl:33" in data["text"] and data["fixes"]
    steps = next(check for check in document["checks"] if check["check"] == "steps")
    assert steps["text"].startswith("20 steps an epoch")
    assert not (tmp_path / "runs").exists()


def test_the_short_form_before_train_is_silent_where_all_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only warnings and problems; no process is started and no data are read."""
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(machine, "limits", lambda: iter([]))
    monkeypatch.setattr(machine, "shared_memory", lambda: iter([]))
    loaded = load_job(str(write_job(tmp_path, ["not json"])))
    assert list(short_check(loaded)) == []
    monkeypatch.setattr(of_job.shutil, "disk_usage", lambda path: _usage(0))
    (found,) = short_check(loaded)
    assert (found.check, found.status) == ("output", "problem")


def test_lines_of_checks_name_status_check_and_fix() -> None:
    found = [Checked("shm", "warning", "64 MiB\x1b[2J", ("docker run --shm-size=16g",))]
    first, second = lines_of(found)
    assert first.split() == ["warning", "shm", "64", "MiB?[2J"]
    assert second.strip() == "fix: docker run --shm-size=16g"


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


def _usage(free: int) -> _Usage:
    return _Usage(2 * free, free, free)


def _doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainwright", "doctor", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
