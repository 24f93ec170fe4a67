"""What watching costs: the sampler's share of a core, a step's time with and without it in pairs, and opening a day.

python benchmarks/watch_overhead.py [--pairs N] [--only cost|pairs|opening]

Writes benchmarks/results/watch_overhead.json. The share is processor time, so that a busy machine does not change it;
the pairs are only worth something on an idle one, and the file says how busy it was.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from trainwright.runs.folder import RunFolder
from trainwright.runs.records import append, read
from trainwright.runs.writing import write_json_atomic
from trainwright.watch.sampler import PERIOD_S, SampleFile
from trainwright.watch.samples import GpuProcess, GpuSample, HostSample, RankSample, Sample

RESULTS = Path(__file__).parent / "results" / "watch_overhead.json"
TRAINWRIGHT = str(Path(sys.executable).with_name("trainwright"))
STANDIN = Path(__file__).parents[1] / "tests" / "standins" / "nvml"
DAY_S, RANKS = 24 * 3600, 8
STEPS_PER_S = 2


def sampler_cost(folder: Path, *, seconds: float = 60) -> dict[str, Any]:
    """Return the processor time of a sampler that watches 8 GPUs (stand-in NVML) and 8 ranks for a while."""
    run = generated_run(folder, ranks=RANKS)
    library = folder / "libnvidia-ml.so.1"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(STANDIN / "standin_nvml.c")]
    subprocess.run([*command, "-Wl,-soname,libnvidia-ml.so.1"], check=True)
    gpu = "gpu NVIDIA_A100-SXM4-80GB cc=8.0 mem=81920 used=60000 util=90 temp=60 power=300 nvlink=1 links=12 proc=1:9\n"
    (folder / "gpus.txt").write_text(RANKS * gpu)
    sampler = subprocess.Popen(
        [sys.executable, "-m", "trainwright.watch.sampler", str(run.path), "1"],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder), "STANDIN_NVML": str(folder / "gpus.txt")},
    )
    try:
        while len(list(read(run.system_jsonl))) < 2:
            assert sampler.poll() is None
            time.sleep(0.2)
        process = psutil.Process(sampler.pid)
        start_s, before, began_s = sum(process.cpu_times()[:2]), len(list(read(run.system_jsonl))), time.monotonic()
        time.sleep(seconds)
        used_s, passed_s = sum(process.cpu_times()[:2]) - start_s, time.monotonic() - began_s
        samples = len(list(read(run.system_jsonl))) - before
        resident = process.memory_info().rss
    finally:
        sampler.terminate()
        sampler.wait()
    return {
        "gpus": RANKS,
        "ranks": RANKS,
        "cores": psutil.cpu_count(),
        "samples": samples,
        "cpu_ms_a_sample": round(1000 * used_s / samples, 3),
        "share_of_a_core_pct": round(100 * used_s / passed_s, 3),
        "share_of_a_core_at_full_pace_pct": round(100 * used_s / samples / PERIOD_S, 3),
        "start_cpu_s": round(start_s, 3),
        "resident_mib": round(resident / 2**20, 1),
    }


def step_time_pairs(folder: Path, pairs: int, steps: int = 300) -> dict[str, Any]:
    """Return the median step of the same run with the sampler at work and with it held still, one after the other.

    Held still (SIGSTOP) rather than left out, and within the same processes, so that nothing else differs; the order
    of the two changes from pair to pair.
    """
    with _training(folder) as (run, process):
        sampler = next(p for p in psutil.Process(process.pid).children() if "trainwright.watch.sampler" in p.cmdline())
        ratios, medians = [], []
        for pair in range(pairs):
            found = {}
            for on in (True, False) if pair % 2 == 0 else (False, True):
                (sampler.resume if on else sampler.suspend)()
                found[on] = _median_step_s(run, steps)
            sampler.resume()
            ratios.append(found[True] / found[False])
            medians.append([round(found[True], 6), round(found[False], 6)])
    spread = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None
    return {
        "pairs": pairs,
        "steps_each": steps,
        "median_step_s_with_and_without": medians,
        "mean_ratio": round(statistics.fmean(ratios), 5),
        "standard_error": spread and round(spread, 5),
    }


def _median_step_s(run: RunFolder, steps: int) -> float:
    """Return the median time of the next `steps` steps."""
    begin = sum(1 for _ in read(run.metrics_jsonl))
    while len(records := list(read(run.metrics_jsonl))) < begin + steps:
        time.sleep(0.5)
    return statistics.median(record["step_s"] for record in records[begin : begin + steps])


@contextmanager
def _training(folder: Path) -> Iterator[tuple[RunFolder, subprocess.Popen[bytes]]]:
    draw = random.Random(1)
    rows = [{"question": f"{draw.randrange(99)} and {draw.randrange(99)}?", "answer": "So."} for _ in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dimensions = {"n_embd": 64, "n_layer": 4, "n_head": 2, "n_positions": 128}
    job = {
        "name": "pairs",
        "output_dir": str(folder),
        "model": {
            "from_scratch": {"architecture": "gpt2", "dimensions": dimensions},
            "tokenizer": {"vocab_size": 400},
        },
        "data": {"path": str(folder / "rows.jsonl"), "max_length": 64, "cache_dir": str(folder / "cache")},
        "train": {"global_batch_size": 8, "micro_batch_size": 8, "learning_rate": 1e-4, "max_steps": 10_000_000},
        "checkpoint": {"every": "100000 steps"},
        "resources": {"device": "cpu", "precision": "fp32", "ranks": 1},
        "tracking": [],
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([TRAINWRIGHT, "train", folder / "job.yaml"], env=environment, stderr=subprocess.DEVNULL)
    run = RunFolder(folder / "pairs")
    try:
        while sum(1 for _ in read(run.metrics_jsonl)) < 50 or not run.system_jsonl.exists():
            assert process.poll() is None
            time.sleep(0.5)
        yield run, process
    finally:
        process.terminate()
        process.wait()


def opening_a_day(folder: Path, tries: int = 5) -> dict[str, Any]:
    """Return how long `watch --once` and `report` take on 8 ranks and 24 h of samples, from start to end."""
    run = generated_run(folder, ranks=RANKS)
    file = SampleFile(run.system_jsonl)
    for number in range(int(DAY_S / PERIOD_S)):
        file.add(generated_sample(time.time() - DAY_S + number * PERIOD_S, RANKS))
    with run.metrics_jsonl.open("w") as metrics:
        for step in range(1, DAY_S * STEPS_PER_S + 1):
            figures = {"kind": "train", "attempt": 1, "step": step, "loss": 4 / step**0.1, "grad_norm": 1.0}
            figures |= {"learning_rate": 1e-5, "epoch": step / 1e4, "tokens_per_s": 9e4, "step_s": 0.5}
            metrics.write(json.dumps(figures | {"memory_gib": 31.5, "samples_seen": 64 * step}) + "\n")
    append(run.events_jsonl, {"event": "finished", "attempt": 1, "step": DAY_S * STEPS_PER_S})
    return {
        "ranks": RANKS,
        "hours": 24,
        "system_jsonl_mib": round(run.system_jsonl.stat().st_size / 2**20, 1),
        "metrics_jsonl_mib": round(run.metrics_jsonl.stat().st_size / 2**20, 1),
        **_times(["watch", str(run.path), "--once"], "172,800", tries),
        "report": _times(["report", str(run.path)], "report.html", tries),
    }


def _times(arguments: list[str], told: str, tries: int) -> dict[str, Any]:
    walls_s, processor_s = [], []
    for _ in range(tries):
        before, began_s = os.times(), time.monotonic()
        done = subprocess.run([TRAINWRIGHT, *arguments], capture_output=True, text=True, check=True)
        after = os.times()
        walls_s.append(time.monotonic() - began_s)
        processor_s.append(after.children_user + after.children_system - before.children_user - before.children_system)
        assert told in done.stdout
    return {
        "wall_s": [round(wall_s, 3) for wall_s in walls_s],
        "processor_s": [round(cpu_s, 3) for cpu_s in processor_s],
    }


def generated_run(folder: Path, *, ranks: int) -> RunFolder:
    """Make a run folder with the signs of life of its ranks and nothing else."""
    run = RunFolder(folder / "generated")
    run.create()
    run.start_attempt()
    run.ranks_dir.mkdir()
    write_json_atomic(run.resolved_json, {"name": "generated", "model": {"name": "none"}, "data": {"path": "none"}})
    append(run.events_jsonl, {"event": "started", "attempt": 1, "step": 0})
    for rank in generated_sample(time.time(), ranks).ranks:
        write_json_atomic(run.rank_json(rank.rank), {"schema_version": 1, **vars(rank)})
    return run


def generated_sample(time_s: float, ranks: int) -> Sample:
    """Return a full sample: every reading is there, on a host of 64 cores."""
    steps = int((time_s % 10**6) * STEPS_PER_S)
    spent_s = {"data": 0.01, "forward": 0.15, "backward": 0.25, "communication": 0.05, "optimizer": 0.04}
    return Sample(
        time_s=time_s,
        node="node-1",
        attempt=1,
        host=HostSample(
            memory_total_bytes=512 * 2**30,
            memory_available_bytes=300 * 2**30,
            swap_total_bytes=0,
            swap_used_bytes=0,
            cpu_pct=31.5,
            cores_pct=tuple(float(core) for core in range(64)),
            disk_read_bytes_s=1e6,
            disk_written_bytes_s=1e6,
            network_received_bytes_s=1e9,
            network_sent_bytes_s=1e9,
            shm_total_bytes=2**36,
            shm_free_bytes=2**36,
            run_disk_total_bytes=2**40,
            run_disk_free_bytes=2**39,
            oom_kill_total=0,
        ),
        gpus=tuple(
            GpuSample(
                index=index,
                uuid=f"GPU-{index}",
                name="NVIDIA H100 80GB HBM3",
                memory_total_bytes=80 * 2**30,
                memory_used_bytes=60 * 2**30 + steps,
                utilization_pct=85 + steps % 10,
                memory_utilization_pct=50,
                temperature_c=60,
                power_w=600.5,
                power_limit_w=700.0,
                sm_clock_mhz=1980,
                sm_clock_max_mhz=1980,
                memory_clock_mhz=2619,
                throttle_reasons=(),
                pcie_received_bytes_s=1e9,
                pcie_sent_bytes_s=1e9,
                nvlink_received_bytes_s=1e11,
                nvlink_sent_bytes_s=1e11,
                ecc_corrected_total=0,
                ecc_uncorrected_total=0,
                xid_total=0,
                processes=(GpuProcess(pid=1000 + index, memory_bytes=60 * 2**30),),
            )
            for index in range(ranks)
        ),
        ranks=tuple(
            RankSample(
                rank=index,
                time_s=time_s,
                attempt=1,
                node=platform.node(),
                pid=os.getpid(),
                device=f"cuda:{index}",
                gpu_uuid=f"GPU-{index}",
                step=steps,
                steps_total=steps,
                total_steps=10**6,
                section="forward",
                section_since_s=time_s,
                sections_s_total={name: seconds * steps for name, seconds in spent_s.items()},
                allocated_bytes=50 * 2**30,
                reserved_bytes=58 * 2**30,
                allocated_peak_bytes=55 * 2**30,
                allocator_retries_total=0,
                resident_bytes=4 * 2**30,
                process_state="R",
            )
            for index in range(ranks)
        ),
    )


def main() -> None:
    """Measure what is asked for and write it down, beside what was measured before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--only", choices=("cost", "pairs", "opening"))
    arguments = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    measures = {
        "cost": sampler_cost,
        "pairs": lambda folder: step_time_pairs(folder, arguments.pairs),
        "opening": opening_a_day,
    }
    for name, measure in measures.items():
        if arguments.only in (None, name):
            load = os.getloadavg()[0]
            with tempfile.TemporaryDirectory() as folder:
                results[name] = {**measure(Path(folder)), "load_before_and_after": [load, os.getloadavg()[0]]}
            print(name, json.dumps(results[name]))
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
