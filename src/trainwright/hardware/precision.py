"""Which arithmetic a device can do well: the choice between bf16, fp16 and fp32, with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from trainwright.hardware import catalog
from trainwright.hardware.choice import Choice
from trainwright.hardware.inventory import Device
from trainwright.hardware.reading import NotAvailable

Precision: TypeAlias = Literal["bf16", "fp16", "fp32"]

BF16_SINCE_MAJOR = 8
"""First compute capability with bf16 tensor cores (CUDA C++ Programming Guide, "Compute Capabilities": 8.0, Ampere)."""


@dataclass(frozen=True)
class PrecisionChoice(Choice[Precision]):
    """A precision and its reason; `warning` is set where it is not the one that was asked for."""

    warning: str | None = None


def choose_precision(device: Device, asked: Precision | Literal["auto"] = "auto") -> PrecisionChoice:
    """Choose for one device: what was asked if the device can do it, else the nearest that it can (S4-18 to S4-22)."""
    best = _best(device)
    if asked == "auto":
        return best
    if asked == "bf16" and best.value != "bf16":
        return PrecisionChoice(best.value, best.reason, _no_bf16(device, best))
    if asked == "fp16" and device.kind == "cpu":
        warning = f"the CPU does not train in FP16, switching to {best.value.upper()}"
        return PrecisionChoice(best.value, best.reason, warning)
    return PrecisionChoice(asked, f"{asked} was asked for")


def _best(device: Device) -> PrecisionChoice:
    match device.kind:
        case "mps":
            return PrecisionChoice("bf16", "an Apple GPU computes in bf16")
        case "cpu" if device.bf16_instructions:
            named = ", ".join(device.bf16_instructions)
            return PrecisionChoice("bf16", f"the processor has native bf16 instructions ({named})")
        case "cpu":
            return PrecisionChoice(
                "fp32", "no native bf16 instructions of the processor are known, and it is slow without"
            )
    capability = _capability(device)
    if capability is None:
        return PrecisionChoice("fp16", "compute capability is not available, and every NVIDIA GPU can do fp16")
    if capability[0] >= BF16_SINCE_MAJOR:
        return PrecisionChoice("bf16", f"compute capability {_pair(capability)} has bf16 (8.0 and later)")
    return PrecisionChoice("fp16", f"compute capability {_pair(capability)} has no bf16 (8.0 and later)")


def _capability(device: Device) -> tuple[int, int] | None:
    """What NVML read, else what the catalogue says of the model."""
    if not isinstance(device.compute_capability, NotAvailable):
        return device.compute_capability
    return None if device.catalog_key is None else catalog.catalog().gpus[device.catalog_key].compute_capability


def _no_bf16(device: Device, best: PrecisionChoice) -> str:
    instead = best.value.upper()
    if device.kind != "cuda":
        return f"the CPU has no native BF16 instructions that are known, switching to {instead}"
    capability = _capability(device)
    if capability is None:
        return f"GPU compute capability is not available, so BF16 is not certain, switching to {instead}"
    return f"GPU compute capability {capability} does not support BF16, switching to {instead}"


def _pair(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
