"""How long a run takes and what it costs in GPU-hours: its steps, its evaluations, its start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from trainwright.anatomy import Anatomy
from trainwright.estimate.figures import StepTime
from trainwright.estimate.request import Request
from trainwright.estimate.time.compute import micro_batch
from trainwright.estimate.time.rates import RateRange, speed_of
from trainwright.hardware import catalog
from trainwright.hardware.inventory import Device

# Imports, CUDA contexts and communicators of one start of the workers. Imports take 3.7 to 4.7 s on two cores, a
# context and its libraries about as long.
_START_S: Final = RateRange(60.0, 20.0, 8.0)
# Weights are read from disk or from the page cache: SATA SSD 0.5, NVMe 2 to 3, cache 6 GB/s.
_READ_BYTES_S: Final = RateRange(0.5e9, 2.0e9, 6.0e9)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTime:
    """Seconds and GPU-hours of a whole run, with the range it is expected in; `parts_s` sum to `run_s`."""

    run_s: float
    low_s: float
    high_s: float
    parts_s: dict[str, float]
    gpu_hours: float
    low_gpu_hours: float
    high_gpu_hours: float


def run_time(
    anatomy: Anatomy,
    request: Request,
    devices: tuple[Device, ...],
    time: StepTime,
    *,
    steps: int,
    evaluations: int = 0,
    evaluation_samples: int = 0,
    starts: int = 1,
    prepare_s: float = 0.0,
) -> RunTime:
    """Estimate a run of `steps` optimizer steps, of which `time` is one.

    Each of `evaluations` passes over `evaluation_samples` samples, shared among the ranks, without gradients.
    `prepare_s` is what is known of preparing the data; each of `starts` loads the weights again.
    """
    evaluation = evaluations * _evaluation_s(anatomy, request, devices, evaluation_samples)
    weights = anatomy.parameter_count * (4 if request.base_dtype == "fp32" else 2)
    parts = {"steps": steps * time.step_s, "evaluation": evaluation}
    parts |= {"start": starts * (_START_S.usual + weights / _READ_BYTES_S.usual), "preparation": prepare_s}
    slow = starts * (_START_S.slow + weights / _READ_BYTES_S.slow) + prepare_s
    fast = starts * (_START_S.fast + weights / _READ_BYTES_S.fast) + prepare_s
    total = sum(parts.values())
    low = (steps * time.step_s + evaluation) * time.low_s / time.step_s + fast
    high = (steps * time.step_s + evaluation) * time.high_s / time.step_s + slow
    hours = len(devices) / 3600
    return RunTime(
        run_s=total,
        low_s=low,
        high_s=high,
        parts_s={part: seconds for part, seconds in parts.items() if seconds > 0},
        gpu_hours=total * hours,
        low_gpu_hours=low * hours,
        high_gpu_hours=high * hours,
    )


def _evaluation_s(anatomy: Anatomy, request: Request, devices: tuple[Device, ...], samples: int) -> float:
    """Seconds of one pass over the evaluation set at the pace of the slowest GPU."""
    if not samples:
        return 0.0
    batch = request.evaluation_batch_size or request.micro_batch_size
    once = replace(request, micro_batch_size=batch, gradient_checkpointing="none")
    keys = {device.catalog_key for device in devices if device.catalog_key is not None}
    gpus = catalog.catalog().gpus
    slowest = max(_forward_s(anatomy, once, gpus[key]) for key in keys)
    return slowest * -(-samples // (batch * len(devices)))


def _forward_s(anatomy: Anatomy, request: Request, gpu: catalog.GpuSpec) -> float:
    forward = micro_batch(anatomy, request, speed_of(gpu)).forward
    return forward.matmul_s + forward.attention_s + forward.memory_s
