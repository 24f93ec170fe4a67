"""How fast a plan is: one layout by closed form, 10,000 layouts ranked, and the command from a cold start.

    python benchmarks/plan_speed.py [--model Qwen/Qwen2.5-7B-Instruct] [--json]

Times are of the process's own work (CPU seconds) beside those of the clock, so that a busy machine shows. The command
runs with torch made impossible to import.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import islice, product
from pathlib import Path
from statistics import median
from typing import Any

from trainwright.anatomy import anatomy, read_config
from trainwright.anatomy.catalog import find
from trainwright.estimate.closed import memory
from trainwright.estimate.request import Request
from trainwright.estimate.time import step_time
from trainwright.hardware.inventory import parse_inventory

LAYOUTS = 10_000
COLD_STARTS = 5
WITHOUT_TORCH = "raise ImportError('planning needs no torch')\n"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen2.5-7B-Instruct")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = {"model": arguments.model} | ranked(arguments.model) | cold(arguments.model)
    if arguments.json:
        print(json.dumps(figures, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name:28} {value:.4g}" if isinstance(value, float) else f"{name:28} {value}")
    return 0


def ranked(model: str) -> dict[str, Any]:
    """Estimate memory and time of 10,000 layouts and put them in order."""
    entry = find(model)
    assert entry is not None, f"{model} is not in the catalogue"
    parts = anatomy(read_config(entry.config))
    base = Request(config=entry.config, micro_batch_size=1, sequence_length=2048)
    devices = {count: parse_inventory(f"a100-80gb:{count}").usable for count in (1, 2, 4, 8, 16, 32, 64)}
    ways = product(
        ("ddp", "fsdp2", "zero2", "zero3"),
        ("none", "non_reentrant"),
        tuple(devices),
        range(1, 33),
        (512, 1024, 1536, 2048, 3072, 4096),
    )
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    found = []
    for strategy, checkpointing, ranks, micro_batch, length in islice(ways, LAYOUTS):
        request = dataclasses.replace(
            base,
            strategy=strategy if ranks > 1 else "single",
            gradient_checkpointing=checkpointing,
            world_size=ranks,
            micro_batch_size=micro_batch,
            sequence_length=length,
        )
        found.append((memory(parts, request).device_bytes, request))
    memory_cpu_s = time.process_time() - began_cpu_s
    timed = [
        (step_time(parts, request, devices[request.world_size]).step_s / request.micro_batch_size, size)
        for size, request in found
    ]
    timed.sort()
    return {
        "layouts": len(timed),
        "layouts_s": time.perf_counter() - began_s,
        "layouts_cpu_s": time.process_time() - began_cpu_s,
        "memory_cpu_us": 1e6 * memory_cpu_s / len(timed),
        "memory_and_time_cpu_us": 1e6 * (time.process_time() - began_cpu_s) / len(timed),
    }


def cold(model: str) -> dict[str, Any]:
    """Run the command a few times, each in a new process."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "torch.py").write_text(WITHOUT_TORCH)
        environment = os.environ | {"PYTHONPATH": place}
        command = [sys.executable, "-m", "trainwright", "plan", "preset:paper_r64", f"model.name={model}"]
        command += ["--gpus", "a100-80gb:4", "--samples", "2500"]
        walls, cpus = [], []
        for _ in range(COLD_STARTS):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            began_s = time.perf_counter()
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            walls.append(time.perf_counter() - began_s)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return {"plan_command_s": median(walls), "plan_command_cpu_s": median(cpus)}


if __name__ == "__main__":
    sys.exit(main())
