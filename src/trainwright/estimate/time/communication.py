"""Seconds that ranks wait for each other's data: what does not fit behind the computation.

Bytes on the ring of N ranks: an all-gather or a reduce-scatter passes (N - 1) / N of the whole tensor through each
rank, an all-reduce twice that (NVIDIA nccl-tests, PERFORMANCE.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from trainwright.estimate.request import Request
from trainwright.estimate.time.links import Link

DDP_BUCKET_BYTES = 25 * 2**20
"""torch.nn.parallel.DistributedDataParallel, `bucket_cap_mb`."""
ZERO_BUCKET_BYTES = 1_000_000_000
"""DeepSpeed's `reduce_bucket_size` of 5e8 elements of 16 bits (`deepspeed/runtime/zero/config.py`)."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """Bytes of the model as it travels: all weights as they are gathered, and the gradients of what is trained."""

    weights: float
    gradients: float
    updated: float
    """Trained weights that ZeRO-1 and 2 gather after the optimizer's step."""
    layers: int


@dataclass(frozen=True, slots=True)
class MicroBatchPace:
    """Seconds of one micro-batch on the slowest rank, the multiprocessors that it has, and its bytes a second."""

    forward_s: float
    backward_s: float
    multiprocessors: int | None
    bandwidth: float


def exposed_s(request: Request, link: Link, rate: float, tensors: Tensors, pace: MicroBatchPace) -> float:
    """Seconds that communication adds to one step, what it hides behind computation left out.

    Copies between tensors and the buffers that travel are added whole: they take the bandwidth that others would have.
    """
    if request.world_size == 1:
        return 0.0
    return _waited_s(request, link, rate, tensors, pace) + _copied_bytes(request, tensors) / pace.bandwidth


def _copied_bytes(request: Request, tensors: Tensors) -> float:
    """Bytes that a step reads and writes to bring tensors into buffers and back.

    DDP scales gradients in their buckets, and, where they are no views of these, copies them out
    (`torch/csrc/distributed/c10d/reducer.cpp`: `mark_variable_ready_dense`, `finalize_bucket_dense`). FSDP2 copies each
    gathered layer out, and gradients in, in the type that they are summed in (`torch/distributed/fsdp/_fully_shard`:
    `foreach_all_gather_copy_out`, `foreach_reduce_scatter_copy_in`); FSDP1 gathers in place and scales gradients. ZeRO
    copies gradients into its bucket (`deepspeed/runtime/zero`: `ipg_buckets`).
    """
    steps, gradients = request.gradient_accumulation_steps, tensors.gradients
    match request.strategy:
        case "ddp":
            return (2 if request.recipe == "trainwright" else 4) * gradients
        case "fsdp2":
            gathers = steps * (2 if request.reshard_after_forward else 1)
            reductions = steps if request.sync_each_micro_batch else 1
            return 2 * gathers * tensors.weights + reductions * (tensors.updated + gradients)
        case "fsdp1" | "zero1":
            return 2 * gradients
        case "zero2" | "zero3":
            return 2 * steps * gradients
        case _:
            return 0.0


def _waited_s(request: Request, link: Link, rate: float, tensors: Tensors, pace: MicroBatchPace) -> float:
    ranks, steps = request.world_size, request.gradient_accumulation_steps
    taken = link.channels / pace.multiprocessors if pace.multiprocessors else 0.0

    def passed(moved: float, operations: int) -> float:
        return link.passed_s(moved, ranks, max(1, operations), rate)

    def gathered_updates() -> float:
        return passed(tensors.updated, ceil(tensors.updated / ZERO_BUCKET_BYTES))

    match request.strategy:
        case "ddp" | "zero1":
            most = DDP_BUCKET_BYTES if request.strategy == "ddp" else ZERO_BUCKET_BYTES
            buckets = max(1, ceil(tensors.gradients / most))
            reduced = link.reduced_s(tensors.gradients, ranks, buckets, rate)
            added = _exposed_s(reduced, pace.backward_s, buckets, taken)
            return added + (gathered_updates() if request.strategy == "zero1" else 0.0)
        case "zero2":
            buckets = max(1, ceil(tensors.gradients / ZERO_BUCKET_BYTES))
            reduced = passed(tensors.gradients, buckets)
            return steps * _exposed_s(reduced, pace.backward_s, buckets, taken) + gathered_updates()
        case "fsdp2" | "fsdp1" | "zero3":
            layers = tensors.layers
            gathered, scattered = passed(tensors.weights, layers), passed(tensors.gradients, layers)
            again = gathered if request.reshard_after_forward else 0.0
            forward = _exposed_s(gathered, pace.forward_s, layers, taken)
            # Gradients are scattered after the last micro-batch only, unless none of them is to be kept whole.
            last = _exposed_s(again + scattered, pace.backward_s, layers, taken)
            in_each = request.strategy == "zero3" or request.sync_each_micro_batch
            other = again + (scattered if in_each else 0.0)
            return steps * forward + last + (steps - 1) * _exposed_s(other, pace.backward_s, layers, taken)
        case _:
            return 0.0


def _exposed_s(communication_s: float, compute_s: float, pieces: int, taken: float) -> float:
    """What communication in equal pieces adds to the computation that it travels behind.

    The first piece of a gather, or the last of a reduction, has nothing to hide behind. While the others travel, the
    computation has `taken`, a share of the multiprocessors, less.
    """
    piece = communication_s / max(1, pieces)
    hidden = min(communication_s - piece, compute_s * (1 - 1 / max(1, pieces)) / (1 - taken))
    return communication_s - hidden + taken * hidden
