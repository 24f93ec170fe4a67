"""Predictions for configurations, made without a GPU and kept: what is measured later is compared with these."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

from configurations import Configuration
from measure import environment

from trainwright.anatomy import anatomy, read_config
from trainwright.errors import UserError
from trainwright.estimate.closed import replayed
from trainwright.estimate.cuda_overhead import context_bytes, libraries_bytes
from trainwright.estimate.request import Request
from trainwright.estimate.time import step_time
from trainwright.hardware import catalog
from trainwright.hardware.inventory import parse_inventory

TOGETHER = 8
"""Configurations that one process traces, which imports the libraries once."""


def predict(
    configurations: Sequence[Configuration], *, gpu_key: str | None, python: str, processes: int
) -> dict[str, Any]:
    """Return all predictions for a GPU of the catalogue, or for the CPU; `python` is whose libraries are traced."""
    gpu = catalog.find(gpu_key) if gpu_key else None
    requests = [
        configuration.request(padding_mask=configuration.needs_mask, **_device(gpu)) for configuration in configurations
    ]
    traced = _trace(requests, python, processes)
    rows = [
        {
            "name": configuration.name,
            "method": configuration.method,
            "strategy": configuration.strategy,
            "ranks": configuration.ranks,
            "checkpointing": configuration.checkpointing,
            "traced": _traced(answer, gpu),
            "closed": _closed(request, gpu),
            "time": _time(request, gpu),
        }
        for configuration, request, answer in zip(configurations, requests, traced, strict=True)
    ]
    return {
        "schema_version": 1,
        "date": date.today().isoformat(),
        "gpu": gpu_key,
        "capacity_bytes": gpu.total_bytes if gpu else None,
        "versions": next((answer["versions"] for answer in traced if "versions" in answer), {}),
        "rows": rows,
    }


def times_of_today(configurations: Sequence[Configuration], gpu_key: str | None) -> dict[str, Any]:
    """Return what the model of time says now of a step on a GPU of the catalogue, by the name of the configuration."""
    gpu = catalog.find(gpu_key) if gpu_key else None
    found = {each.name: _time(each.request(**_device(gpu)), gpu) for each in configurations}
    return {name: time for name, time in found.items() if time is not None and "error" not in time}


def _device(gpu: catalog.GpuSpec | None) -> dict[str, Any]:
    if gpu is None:
        return {"device": "cpu"}
    assert gpu.total_bytes is not None and gpu.compute_capability is not None
    return {
        "compute_capability": list(gpu.compute_capability),
        "capacity_bytes": gpu.total_bytes - _outside_bytes(gpu),
    }


def _outside_bytes(gpu: catalog.GpuSpec) -> int:
    assert gpu.compute_capability is not None
    return context_bytes(gpu) + libraries_bytes(gpu.compute_capability)


def _trace(requests: list[dict[str, Any]], python: str, processes: int) -> list[dict[str, Any]]:
    chunks = [requests[start : start + TOGETHER] for start in range(0, len(requests), TOGETHER)]
    with ThreadPoolExecutor(processes) as pool:
        return [answer for answers in pool.map(lambda chunk: _trace_chunk(chunk, python), chunks) for answer in answers]


def _trace_chunk(requests: list[dict[str, Any]], python: str) -> list[dict[str, Any]]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(requests, file)
        file.flush()
        command = [python, "-m", "trainwright.estimate.trace.answer", file.name]
        threads = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, env=environment() | threads, stdout=subprocess.PIPE, text=True, check=True)
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def _traced(answer: dict[str, Any], gpu: catalog.GpuSpec | None) -> dict[str, Any]:
    if "error" in answer:
        return {"error": " ".join([answer["error"], *answer["problems"]])}
    peak = answer["peak"]
    return {
        "allocated_bytes": peak["allocated_bytes"],
        "reserved_bytes": peak["reserved_bytes"],
        "device_bytes": peak["reserved_bytes"] + _outside_bytes(gpu) if gpu else None,
        "out_of_memory": peak["out_of_memory"],
        "static_bytes": answer["static_bytes"],
        "parameters": answer["parameters"],
        "peak": f"{peak['phase']} {peak['step']}: {peak['operator']}",
        "parts_bytes": peak["parts_bytes"],
        "attention_kernels": answer["attention_kernels"],
    }


def _closed(data: dict[str, Any], gpu: catalog.GpuSpec | None) -> dict[str, Any]:
    try:
        request = Request.parse(data)
        found = replayed(anatomy(read_config(request.config)), request, gpu)
    except UserError as error:
        return {"error": " ".join([error.message, *error.problems])}
    # Over gloo, ranks on one GPU have none of the communicators that a run on several would have.
    communicators = found.outside_bytes.get("communicators", 0)
    device_bytes = found.device_bytes - communicators if gpu else None
    capacity = gpu.total_bytes if gpu else None
    return {
        "allocated_bytes": found.allocated_bytes,
        "reserved_bytes": found.reserved_bytes,
        "device_bytes": device_bytes,
        "out_of_memory": None if device_bytes is None or capacity is None else device_bytes > capacity,
        "peak": found.peak,
        "parts_bytes": dict(found.parts_bytes),
    }


def _time(data: dict[str, Any], gpu: catalog.GpuSpec | None) -> dict[str, Any] | None:
    """Nothing is predicted for a CPU, and for ranks that share a GPU."""
    if gpu is None or data["world_size"] > 1:
        return None
    try:
        request = Request.parse(data)
        found = step_time(anatomy(read_config(request.config)), request, parse_inventory(gpu.key).devices)
    except UserError as error:
        return {"error": " ".join([error.message, *error.problems])}
    return dataclasses.asdict(found)


def freeze(path: Path, predictions: dict[str, Any]) -> None:
    """Write predictions to a new file.

    Raises:
        FileExistsError: there are predictions already; what was predicted before a measurement stays as it is.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with os.fdopen(descriptor, "w") as file:
        json.dump(predictions, file, indent=1)
        file.write("\n")
    print(f"{len(predictions['rows'])} predictions: {path}", file=sys.stderr)
