"""What rank 0 prints: the start of a run, and a line for each step."""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass

import torch

from trainwright.train.assignment import Assignment
from trainwright.train.measuring import resident_bytes
from trainwright.train.models import ParameterCount
from trainwright.train.ranks import Ranks


def say(line: str) -> None:
    """Print one line at once; the launcher shows what rank 0 prints."""
    print(line, flush=True)


def environment_lines(ranks: Ranks) -> list[str]:
    """Return the three lines that say how many processes and GPUs really take part, and on what."""
    device, several = ranks.device, ranks.world_size > 1
    kind = {"cuda": "MULTI_GPU" if several else "GPU", "cpu": "MULTI_CPU" if several else "CPU", "mps": "MPS"}
    gpus = ranks.world_size if device.type == "cuda" else int(device.type == "mps")
    lines = [
        f"Distributed environment: {kind[device.type]}",
        f"Number of processes: {ranks.world_size}",
        f"Number of GPUs: {gpus}",
    ]
    if device.type == "cuda":
        lines.append(
            f"Device: {torch.cuda.get_device_name(device)}, CUDA available: True, CUDA version: {torch.version.cuda}"
        )
    else:
        lines.append(f"Device: {device.type}, CUDA available: {torch.cuda.is_available()}")
    return lines


def model_lines(count: ParameterCount, assignment: Assignment, global_batch_size: int) -> list[str]:
    """Return the lines on parameters and batch."""
    adapters = f" in {count.adapter_layers} adapter layers" if count.adapter_layers else ""
    return [
        f"Parameters: {count.total:,} in all, {count.trainable:,} trained ({count.trainable_pct:.2f} %){adapters}",
        f"Effective batch: {_batch(assignment, global_batch_size)}",
    ]


def _batch(assignment: Assignment, global_batch_size: int) -> str:
    if assignment.rank_samples:
        shares = " + ".join(map(str, assignment.rank_samples))
        return f"{shares} = {global_batch_size} (each rank's part, by its speed)"
    micro, accumulation = assignment.micro_batch_size, assignment.gradient_accumulation_steps
    product = micro * accumulation * assignment.world_size
    kept = "" if product == global_batch_size else f", filled with {global_batch_size} samples"
    return f"{micro} x {accumulation} x {assignment.world_size} = {product} (micro x accumulation x ranks){kept}"


@dataclass(frozen=True)
class StepLine:
    """The figures of one optimizer step."""

    step: int
    total_steps: int
    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_s: float
    step_s: float
    memory_gib: float
    left_s: float

    def __str__(self) -> str:
        left = datetime.timedelta(seconds=round(self.left_s))
        return (
            f"step {self.step}/{self.total_steps}  epoch {self.epoch:.2f}  loss {self.loss:.4f}  "
            f"lr {self.learning_rate:.3g}  {self.tokens_per_s:,.0f} tokens/s  {self.step_s:.3f} s/step  "
            f"memory {self.memory_gib:.2f} GiB  left {left}"
        )


def memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process: of the allocator on a GPU, resident on the CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / 2**30
    if device.type == "mps":
        return float(torch.mps.driver_allocated_memory()) / 2**30
    return resident_bytes() / 2**30


class StepPace:
    """How long steps take lately, for the estimate of the time left."""

    def __init__(self) -> None:
        self._steps = 0
        self._mean_s = math.nan

    def add(self, step_s: float) -> None:
        """Take one step into the running mean, over about ten steps; the first, which warms up, gives way at once."""
        self._steps += 1
        self._mean_s = step_s if self._steps <= 2 else 0.9 * self._mean_s + 0.1 * step_s

    def left_s(self, steps: int) -> float:
        """Return the seconds that `steps` more will take."""
        return steps * self._mean_s
