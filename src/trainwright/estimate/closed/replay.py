"""What PyTorch's caching allocator makes of two steps of the whole model: the reserved memory of a layout.

Allocated memory runs along a line from layer to layer, so a short model tells it (`memory_timeline`). What the
allocator holds besides depends on the order in which pieces of all sizes come and go. Here all layers pass, and every
piece goes through the simulation of the allocator that the traced step uses as well. Of two steps, as the states of
the optimizer come at the end of the first one, into what the micro-batches have left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from trainwright.anatomy.parameters import path_of
from trainwright.anatomy.parts import Anatomy, ModuleWeight
from trainwright.anatomy.quantized import nf4_bytes
from trainwright.estimate.allocator import CachingAllocator
from trainwright.estimate.closed.parameter_memory import (
    BYTES,
    Held,
    Parameters,
    adapter_bytes,
    moment_pieces,
    sharded,
    trained_bytes,
    update_pieces,
)
from trainwright.estimate.closed.tape import FP32, Recording
from trainwright.estimate.reductions import row_sum_bytes
from trainwright.estimate.request import Request

STEPS = 2
HANDLES = 2
"""Of cuBLAS: one in the thread that goes forward, one in autograd's."""


@dataclass(frozen=True, slots=True)
class ReplayedPasses:
    """What a step consists of; `first` is a micro-batch before the last, None where there is none, or none is known."""

    first: Recording | None
    last: Recording
    evaluation: Recording | None


@dataclass(frozen=True, slots=True)
class Reserved:
    """Peaks in bytes: allocated (in blocks) and reserved by the steps, and reserved when an evaluation has followed."""

    allocated_bytes: int
    step_bytes: int
    evaluation_bytes: int | None


def replay(
    anatomy: Anatomy, request: Request, found: Parameters, there: Held, passes: ReplayedPasses, inputs_bytes: int
) -> Reserved:
    """Play the steps, and an evaluation pass where there is one; `inputs_bytes` are those of a sample."""
    gpu = _Gpu(request, there.static["workspaces"] // HANDLES)
    local = sharded(found, request.world_size) if request.strategy == "fsdp2" else found
    by_torch = not request.strategy.startswith("zero")
    samples = request.micro_batch_size
    gpu.take(_standing(anatomy, request, found, there))
    for step in range(STEPS):
        passing = gpu.take([samples * inputs_bytes])
        for part, size in there.passing.items():
            if part == "gradients":
                if passes.first is None:
                    gpu.carry(_carried(size, found, request))
            else:
                passing += gpu.take([size])
        if passes.first is not None:
            gpu.play(passes.first, samples)
        gpu.play(passes.last, samples)
        gpu.give_back(passing)
        gpu.give_back(gpu.take(_of_update(local, there, request)))
        if step == 0 and by_torch:
            gpu.take(moment_pieces(local.trained, trained_bytes(request), request.optimizer))
        gpu.clear_gradients()
    allocated_bytes, step_bytes = gpu.allocator.peak_allocated_bytes, gpu.allocator.peak_reserved_bytes
    if passes.evaluation is None or request.evaluation_batch_size is None:
        return Reserved(allocated_bytes, step_bytes, None)
    gpu.take([request.evaluation_batch_size * inputs_bytes])
    gpu.play(passes.evaluation, request.evaluation_batch_size)
    return Reserved(allocated_bytes, step_bytes, gpu.allocator.peak_reserved_bytes)


class _Gpu:
    """An allocator, the gradients that outlive a micro-batch, and the workspaces of handles that are yet to open."""

    def __init__(self, request: Request, workspace_bytes: int) -> None:
        self.allocator = CachingAllocator(expandable_segments=request.expandable_segments)
        self._capability = request.compute_capability
        self._workspaces = [workspace_bytes] * HANDLES
        self._names = 0
        self._gradients: dict[int, list[int]] = defaultdict(list)
        """Their names by size."""
        self._played: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def take(self, sizes_bytes: Iterable[int]) -> list[int]:
        """Take pieces; return their names."""
        names = []
        for size in sizes_bytes:
            self.allocator.allocate(self._names, size)
            names.append(self._names)
            self._names += 1
        return names

    def pass_by(self, size_bytes: int) -> None:
        """Take a piece and free it at once."""
        self.give_back(self.take([size_bytes]))

    def give_back(self, names: Iterable[int]) -> None:
        """Free pieces."""
        for name in names:
            self.allocator.free(name)

    def carry(self, sizes_bytes: Sequence[int]) -> None:
        """Take gradients."""
        for name, size in zip(self.take(sizes_bytes), sizes_bytes, strict=True):
            self._gradients[size].append(name)

    def clear_gradients(self) -> None:
        """Free all gradients."""
        for names in self._gradients.values():
            self.give_back(names)
        self._gradients.clear()

    def play(self, recording: Recording, samples: int) -> None:
        """Let a recorded pass happen; what it leaves are gradients."""
        allocate, free, first = self.allocator.allocate, self.allocator.free, self._names
        self._names += recording.keys
        streams, given_back = recording.streams, recording.given_back
        for key, size in self._sized(recording, samples):
            if size > 0:
                allocate(first + key, size, streams.get(key, 0))
            elif key in given_back:
                free(self._gradients[-size].pop())
            elif size < 0:
                free(first + key)
            elif key in recording.sums:
                rows, columns = recording.sums[key]
                self.pass_by(row_sum_bytes(round(rows.real + samples * rows.imag), columns, self._capability))
            elif self._workspaces:
                allocate(first + key, self._workspaces.pop())
        for key, line in recording.left:
            self._gradients[round(line.real + samples * line.imag)].append(first + key)

    def _sized(self, recording: Recording, samples: int) -> Sequence[tuple[int, int]]:
        """Keys and bytes of its events, which are played once a step."""
        known = self._played.get((id(recording), samples))
        if known is None:
            known = [(key, round(line.real + samples * line.imag)) for key, line in recording.events]
            self._played[id(recording), samples] = known
        return known


def _standing(anatomy: Anatomy, request: Request, found: Parameters, there: Held) -> list[int]:
    """Cut what is there all the time into tensors: weights, adapters, DDP's buckets; all of ZeRO's."""
    static = {part: size for part, size in there.static.items() if part not in ("rounding", "workspaces")}
    if request.strategy.startswith("zero"):
        return list(static.values())  # DeepSpeed lays tensors flat
    del static["optimizer"]
    if request.strategy == "fsdp2":
        pieces = list(_by_units(anatomy, request, found))
    elif request.method.type == "full":
        pieces = [BYTES[request.base_dtype] * prod(shape) for shape in (*found.trained, *found.frozen)]
    else:
        pieces = [_frozen_bytes(request) * prod(shape) for shape in found.frozen]
        pieces += [size for numbers in found.packed for size in (numbers // 2, _scales_bytes(numbers))]
        pieces += [adapter_bytes(request) * prod(shape) for shape in found.trained]
    buckets = static.pop("gradients", 0)
    return [*pieces, sum(static.values()) - sum(pieces), buckets]


def _by_units(anatomy: Anatomy, request: Request, found: Parameters) -> Iterator[int]:
    """FSDP2 cuts layer by layer, what is no layer's at last; the scales of packed weights stay as they were."""
    ranks = request.world_size
    full = request.method.type == "full"
    base, adapter = BYTES[request.base_dtype] if full else _frozen_bytes(request), adapter_bytes(request)
    yield from map(_scales_bytes, found.packed)
    for segment in sorted(anatomy.segments, key=lambda segment: not segment.is_layer):
        for weight in segment.operations:
            if not isinstance(weight, ModuleWeight):
                continue
            path = path_of(segment, weight)
            for name, shape in weight.parameters(segment.prefix):
                if path in found.packed_paths and name.endswith("weight"):
                    yield -(-(found.packed_paths[path] // 2) // ranks)
                else:
                    yield base * -(-shape[0] // ranks) * prod(shape[1:])
            if path in found.adapted:
                pair = found.adapted[path]
                inner = pair.copies * pair.rank
                yield adapter * -(-inner // ranks) * pair.columns
                yield adapter * -(-pair.rows // ranks) * inner


def _frozen_bytes(request: Request) -> int:
    return FP32 if request.method.upcast_frozen != "none" else BYTES[request.base_dtype]


def _scales_bytes(numbers: int) -> int:
    return nf4_bytes(numbers) - -(-numbers // 2)


def _carried(total: int, found: Parameters, request: Request) -> list[int]:
    """Gradients of earlier micro-batches under ZeRO: ZeRO-1's are whole."""
    if request.strategy != "zero1":
        return [total]
    return [BYTES[request.precision] * prod(shape) for shape in found.trained]


def _of_update(found: Parameters, there: Held, request: Request) -> list[int]:
    """What the optimizer's step takes; of ours the gradients are there already."""
    if request.strategy.startswith("zero"):
        return list(there.update.values())
    return update_pieces(found.trained, trained_bytes(request), request.optimizer)
