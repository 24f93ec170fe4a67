"""Run folders written by the project's own writers, as a run on GPUs leaves them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainwright.runs.folder import RunFolder
from trainwright.runs.records import append
from trainwright.runs.writing import write_json_atomic
from trainwright.watch.sampler import SampleFile
from trainwright.watch.samples import GpuSample, HostSample, RankSample, Sample

GIB = 2**30
BEGAN_S = 1_790_000_000.0
SECTIONS = ("start", "data", "forward", "backward", "communication", "optimizer", "eval", "save", "other")


@dataclass
class WrittenRun:
    """A run on `ranks` GPUs, of which the parts that a test asks for are written."""

    parent: Path
    name: str = "written"
    ranks: int = 2
    micro: int = 8
    strategy: str = "ddp"
    step_s: float = 0.5
    tokens_per_s: float = 8000.0
    job: dict[str, Any] = field(default_factory=dict)
    claims: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = RunFolder(self.parent / self.name)
        self.folder.create()
        layout = {
            "device": "cuda",
            "ranks": self.ranks,
            "strategy": self.strategy,
            "precision": "bf16",
            "offload": "none",
            "global_batch_size": self.micro * self.ranks,
            "micro_batch_size": self.micro,
            "gradient_accumulation_steps": 1,
            "eval_batch_size": 3 * self.micro,
            "gradient_checkpointing": False,
        }
        gib = {"allocated_bytes": 10 * GIB, "reserved_bytes": 11 * GIB, "device_bytes": 12 * GIB}
        estimate = {
            "memory_kind": "estimate",
            "memory": gib,
            "host": {"rank_parts_bytes": {"process": 2 * GIB, "data": GIB}, "node_bytes": 6 * GIB, "peak": "training"},
            "time_kind": "calibrated (3 runs)",
            "time": {"step_s": 0.4, "low_s": 0.3, "high_s": 0.6},
            "run": {"run_s": 80.0, "low_s": 60.0, "high_s": 120.0},
        }
        choices = {"resources.strategy": {"value": self.strategy, "reason": "the whole model fits on each GPU"}}
        gpu = {"name": "NVIDIA A100-SXM4-40GB", "model": "a100-40gb", "node": 0}
        plan = {"layout": layout, "learning_rate": 1e-5, "choices": choices, "estimate": estimate}
        plan |= {"warnings": ["slow disk"], "advice": []}
        write_json_atomic(self.folder.plan_json, plan | {"devices": [gpu | {"index": n} for n in range(self.ranks)]})
        job = {"name": self.name, "model": {"name": "Qwen/Qwen3-0.6B"}, "data": {"path": "d.jsonl", "max_length": 512}}
        job |= {"task": "causal-lm", "method": {"type": "lora"}, "claims": self.claims}
        write_json_atomic(self.folder.resolved_json, job | self.job)

    def begin(self, *, step: int = 0, from_checkpoint: str | None = None, at_s: float = BEGAN_S) -> int:
        """Open an attempt as the launcher does, and say that its ranks began."""
        attempt = self.folder.start_attempt()
        start = {"attempt": attempt, "time_s": at_s, "resume_from": from_checkpoint, "step": step, "contract": {}}
        write_json_atomic(self.folder.attempt_dir(attempt) / "start.json", start)
        append(self.folder.events_jsonl, {"event": "started", "attempt": attempt, "step": step})
        return attempt

    def train(self, first: int, last: int, *, attempt: int = 1, loss_at: dict[int, float | None] | None = None) -> None:
        """Record steps, and an evaluation of the last."""
        with self.folder.metrics_jsonl.open("a") as metrics:
            for step in range(first, last + 1):
                loss = (loss_at or {}).get(step, 4.0 / step**0.2)
                record = {"kind": "train", "attempt": attempt, "step": step, "loss": loss, "learning_rate": 1e-5}
                record |= {"epoch": step / 100, "tokens_per_s": self.tokens_per_s, "step_s": self.step_s}
                metrics.write(json.dumps(record, separators=(",", ":")) + "\n")
        append(self.folder.metrics_jsonl, {"kind": "eval", "attempt": attempt, "step": last, "loss": 2.25})

    def sample(self, count: int, *, attempt: int = 1, at_s: float = BEGAN_S, peak_at: int | None = None) -> None:
        """Let the sampler see GPUs, host and ranks, four seconds apart; one sample has a peak of memory."""
        samples = SampleFile(self.folder.system_jsonl)
        for number in range(count):
            used = 30 * GIB if number == peak_at else 20 * GIB
            samples.add(self._sample(at_s + 4.0 * (number + 1), attempt, number + 1, used))

    def _sample(self, time_s: float, attempt: int, steps: int, used: int) -> Sample:
        gpus = tuple(
            GpuSample(
                index=rank,
                uuid=f"GPU-{rank}",
                name="NVIDIA A100-SXM4-40GB",
                memory_total_bytes=40 * GIB,
                memory_used_bytes=used + rank * GIB,
                utilization_pct=80 + rank,
                temperature_c=None,
            )
            for rank in range(self.ranks)
        )
        ranks = tuple(
            RankSample(
                rank=rank,
                time_s=time_s,
                attempt=attempt,
                gpu_uuid=f"GPU-{rank}",
                step=steps,
                steps_total=steps,
                total_steps=100,
                sections_s_total=dict.fromkeys(SECTIONS, 0.1 * steps),
                reserved_bytes=9 * GIB,
                allocated_peak_bytes=8 * GIB,
                resident_bytes=3 * GIB,
            )
            for rank in range(self.ranks)
        )
        host = HostSample(memory_total_bytes=64 * GIB, memory_available_bytes=32 * GIB, cpu_pct=12.5)
        return Sample(time_s=time_s, node="node-1", attempt=attempt, host=host, gpus=gpus, ranks=ranks)

    def measure(self, *, attempt: int = 1, device_gib: float = 13.5) -> None:
        """Let each rank say what it measured of itself."""
        for rank in range(self.ranks):
            figures = {"allocated_bytes": 10 * GIB, "reserved_bytes": 12 * GIB, "device_bytes": int(device_gib * GIB)}
            place = {"event": "measured", "attempt": attempt, "rank": rank, "resident_bytes": 2 * GIB}
            append(self.folder.events_jsonl, place | figures)

    def end(self, event: str = "finished", *, attempt: int = 1, at_s: float = BEGAN_S + 100, **more: Any) -> None:
        """Write down how an attempt ended."""
        append(self.folder.events_jsonl, {"event": event, "time_s": at_s, "attempt": attempt, **more})

    @classmethod
    def whole(cls, parent: Path, **how: Any) -> WrittenRun:
        """Write a finished run of 100 steps."""
        run = cls(parent, **how)
        run.begin()
        run.train(1, 100)
        run.sample(25)
        run.measure()
        run.end(step=100)
        return run


def trainwright(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "trainwright", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def document(*runs: Path) -> dict[str, Any]:
    """Return what `trainwright report RUN... --json` prints."""
    done = trainwright("report", *runs, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
