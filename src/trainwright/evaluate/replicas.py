"""Copies of the model, one worker each: on which devices, and why (S3-09 to S3-16)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainwright.anatomy import Anatomy, anatomy
from trainwright.anatomy.catalog import config_of
from trainwright.errors import UserError
from trainwright.evaluate.engines.engine import Placement
from trainwright.evaluate.eval_config import EvalConfig
from trainwright.hardware.choice import Choice
from trainwright.hardware.inventory import Device, Inventory
from trainwright.hardware.selection import cuda_environment, select_devices
from trainwright.hardware.threads import thread_environment
from trainwright.plan.modes import GpuMode, answer_dtype, answer_mode

SAMPLES = 8
"""Questions at a time that a copy must have room for where the batch size is left open."""


@dataclass(frozen=True)
class Replica:
    """One copy: the devices as its process sees them, and the environment that makes it see them."""

    placement: Placement
    environment: Mapping[str, str]
    label: str


@dataclass(frozen=True)
class ReplicaSet:
    """All copies of one run."""

    mode: Choice[GpuMode]
    dtype: Choice[str]
    gpu_ids: tuple[int, ...]
    replicas: tuple[Replica, ...]

    @property
    def on_cuda(self) -> bool:
        """Whether NVIDIA GPUs answer."""
        return isinstance(self.replicas[0].placement, tuple)


def spread(asked: EvalConfig, inventory: Inventory, *, length: int) -> ReplicaSet:
    """Return where the model answers prompts of `length` tokens, answers included.

    Raises:
        UserError: the devices asked for are not there (exit code 4), or the model does not fit (3), with the figures.
    """
    devices = select_devices(inventory, "auto" if asked.gpu_ids == "all" else asked.gpu_ids)
    dtype = answer_dtype(devices[0], asked.dtype)
    copies = _copies(asked, devices[0])
    model = _model(asked)
    if isinstance(model, str):
        mode, groups = _unpredicted(asked, devices, copies, model)
    else:
        samples = SAMPLES if asked.batch_size == "auto" else asked.batch_size
        predicted = answer_mode(
            model,
            devices,
            asked.gpu_mode,
            dtype=dtype.value,
            samples=samples,
            length=length,
            gpus_per_replica=None if asked.gpus_per_replica == "auto" else asked.gpus_per_replica,
            cpu_replicas=copies,
        )
        mode, groups = Choice(predicted.mode, predicted.reason), predicted.groups
    replicas = [_replica([devices[number] for number in group], len(groups)) for group in groups]
    used = sorted({number for group in groups for number in group})
    return ReplicaSet(
        mode,
        Choice(dtype.value, dtype.reason or f"{dtype.value} was asked for"),
        tuple(devices[number].index or 0 for number in used if devices[number].kind == "cuda"),
        tuple(replicas),
    )


def _copies(asked: EvalConfig, device: Device) -> int:
    """Return how many copies a processor holds."""
    if device.kind != "cpu":
        return 1
    if asked.workers == "auto":
        return 2 if asked.gpu_mode == "data_parallel" else 1
    if asked.workers > 1 and asked.gpu_mode == "single":
        raise UserError(
            f"gpu_mode=single is one worker, and {asked.workers} are asked for", hints=["gpu_mode=data_parallel"]
        )
    return asked.workers


def _model(asked: EvalConfig) -> Anatomy | str:
    """Return what the model is made of, or why that is not known."""
    if ":" in asked.engine:
        return f"the engine {asked.engine} is your own"
    try:
        return anatomy(config_of(asked.model))
    except UserError as error:
        return error.message


def _unpredicted(
    asked: EvalConfig, devices: tuple[Device, ...], copies: int, why: str
) -> tuple[Choice[GpuMode], tuple[tuple[int, ...], ...]]:
    """Return the mode and the groups where the memory of the model cannot be predicted."""
    everything = tuple(range(len(devices)))
    because = f"no memory is predicted, as {why}"
    if devices[0].kind != "cuda":
        if asked.gpu_mode == "accelerate":
            raise UserError("gpu_mode=accelerate spreads layers over GPUs, and there are none", hints=["gpu_mode=auto"])
        return Choice("data_parallel" if copies > 1 else "single", because), ((0,),) * copies
    if asked.gpu_mode == "accelerate":
        return Choice("accelerate", f"as was asked; {because}"), (everything,)
    if asked.gpu_mode == "single" or len(devices) == 1:
        return Choice("single", because), ((0,),)
    size = 1 if asked.gpus_per_replica == "auto" else asked.gpus_per_replica
    groups = tuple(everything[start : start + size] for start in range(0, len(devices) - size + 1, size))
    return Choice("data_parallel", f"a copy on each; {because}"), groups


def _replica(devices: list[Device], copies: int) -> Replica:
    first = devices[0]
    environment = {
        **thread_environment(copies),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    if first.kind == "cuda":
        numbers = " ".join(str(device.index) for device in devices)
        label = f"GPU{'s' if len(devices) > 1 else ''} {numbers}"
        return Replica(tuple(range(len(devices))), environment | cuda_environment(devices), label)
    kind = first.kind
    return Replica(kind, environment | {"CUDA_VISIBLE_DEVICES": ""}, kind.upper())
