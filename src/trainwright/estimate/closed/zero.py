"""ZeRO by DeepSpeed's own bookkeeping (0.19.8), with the settings of `trainwright.plan.choose.deepspeed_config`.

`runtime/zero/stage_1_and_2.py`: trained weights lie flat in the compute dtype, each rank owns a part of the fp32
weights and moments, gradients pass two buckets. `stage3.py`, `partition_parameters.py` and
`partitioned_param_coordinator.py`: every parameter is cut, and gathered module by module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod

from trainwright.estimate.closed.parameter_memory import BYTES, Held, Parameters, Shape, elements
from trainwright.estimate.closed.tape import Storage, Tape, TapeParameter, Tensor
from trainwright.estimate.request import Request

BUCKET = 200_000_000
"""Numbers in a bucket: `reduce_bucket_size` of our config."""
SUB_GROUP = 1_000_000_000
PREFETCHED = 50_000_000
REUSED_WITHIN = 1_000_000_000
"""`sub_group_size`, `prefetch_bucket_size` and `max_reuse_distance`: defaults of `runtime/zero/config.py`."""
MASTER, MOMENTS = 4, 8


def held(request: Request, found: Parameters, packed_bytes: int, largest_layer: int) -> Held:
    """Bytes of a rank under ZeRO; `packed_bytes` is what 4-bit matrices take."""
    element, stage = BYTES[request.precision], int(request.strategy[-1])
    groups = _groups(found.trained)
    own = [-(-sum(group) // request.world_size) for group in groups]
    on_gpu = request.offload == "none"
    part = "weights" if request.method.type == "full" else "adapters"
    static = {"weights": element * elements(found.frozen) + packed_bytes, "adapters": 0, "optimizer": 0}
    if on_gpu:
        static["optimizer"] = (MASTER + MOMENTS) * sum(own)
    if stage == 3:
        return _stage_3(request, found, static, part, packed_bytes, largest_layer)
    static[part] += element * sum(map(sum, groups))
    touched = sum(_touched(group, part_size, request.world_size) for group, part_size in zip(groups, own, strict=True))
    if not on_gpu:
        static["communication"] = element * max(map(prod, found.trained))
    carried = 0
    if request.gradient_accumulation_steps > 1:
        carried = element * (elements(found.trained) if stage == 1 else touched * on_gpu)
    flat = (element + (MASTER if element != MASTER else 0)) * max(own) if on_gpu else 0
    return Held(static, {"gradients": carried}, {"gradients": element * touched * on_gpu, "temporaries": flat})


def _stage_3(
    request: Request, found: Parameters, static: dict[str, int], part: str, packed_bytes: int, largest_layer: int
) -> Held:
    element, ranks = BYTES[request.precision], request.world_size
    on_gpu = request.offload == "none"
    shard = {name: sum(-(-prod(s) // ranks) for s in shapes) for name, shapes in _kinds(found)}
    if request.offload == "optimizer+parameters":
        static["weights"] = 0
    else:
        static["weights"] = element * shard["frozen"] + -(-packed_bytes // ranks)
        static[part] += element * shard["trained"]
    if on_gpu:
        static["optimizer"] = (MASTER + MOMENTS) * shard["trained"]
        static["gradients"] = element * shard["trained"]
    whole = elements(found.trained) + elements(found.frozen) + packed_bytes // element
    largest = max(prod(shape) for shape in (*found.trained, *found.frozen))
    # A weight stays gathered if it is used again within the distance, which counts the way there and back. Where all
    # of them do, nothing is under way any more when the loss is there.
    gathered = min(whole, REUSED_WITHIN // 2 + PREFETCHED + largest_layer + largest)
    under_way = max(PREFETCHED, largest) if gathered < whole else 0
    static["communication"] = element * BUCKET
    passing = {"gathered weights": element * gathered, "communication": element * under_way}
    sub_group = min(SUB_GROUP, shard["trained"])
    flat = (element + (MASTER if element != MASTER else 0)) * sub_group if on_gpu else 0
    return Held(static, passing, {"temporaries": flat})


class Buckets:
    """Where gradients go as they are made: into a bucket, which is reduced when it is full."""

    def __init__(
        self, tape: Tape, strategy: str, element: int, kept_bytes: int, trained: int, *, accumulating: bool
    ) -> None:
        self._tape, self._stage, self._element = tape, int(strategy[-1]), element
        self._trained = trained
        """Numbers that are trained, in the layers too that a short model leaves out."""
        self._kept_bytes = kept_bytes
        """Gradients of a rank's own part, copied out of the buckets as they are reduced."""
        self._accumulating = accumulating
        self._filled = self._taken = 0
        self._buffers: Storage | None = None
        self._kept: Storage | None = None
        self._large: Storage | None = None
        if accumulating and self._stage == 1:
            self._open()  # it reduces at the end of a step alone, and keeps its buckets until then

    def take(self, weight: TapeParameter, held: list[Tensor]) -> None:
        """A gradient is complete (`reduce_independent_p_g_buckets_and_remove_grads`)."""
        tape, gradient = self._tape, held.pop()
        if self._buffers is None and self._stage < 3:
            self._open()
        self._large = None
        if self._accumulating and self._stage == 1:
            tape.given_back(gradient.elements * self._element, "gradients")
        if self._filled and self._filled + weight.elements > BUCKET:
            self._reduce()
        self._filled += weight.elements
        self._taken += weight.elements
        if weight.elements > BUCKET:
            self._large = gradient.storage

    def finish(self) -> None:
        """The backward pass is over; what a short model leaves out may have filled the bucket."""
        if self._taken < self._trained:
            self._filled = min(self._trained, BUCKET)
        self._reduce()
        self._large = self._buffers = self._kept = None

    def _open(self) -> None:
        """Two buckets: one is filled while the other is reduced."""
        self._buffers = Storage(self._tape, complex(2 * self._element * BUCKET), "communication")

    def _reduce(self) -> None:
        """Empty the bucket: what is in it is first put in order in a buffer of its size.

        That is in ZeRO-3's `reduce_scatter_coalesced` and in `allreduce_bucket` of the others, whose
        `copy_grads_in_partition` then takes memory for a rank's whole part, at the first time.
        """
        self._tape.passing(complex(self._element * self._filled), part="communication")
        if self._stage < 3 and self._kept is None:
            self._kept = Storage(self._tape, complex(self._kept_bytes), "gradients")
        self._filled = 0


def _kinds(found: Parameters) -> Iterable[tuple[str, Sequence[Shape]]]:
    return (("trained", found.trained), ("frozen", found.frozen))


def _groups(trained: Iterable[Shape]) -> list[list[int]]:
    """Sizes of the optimizer's two groups: matrices decay, biases and norms do not."""
    groups: dict[bool, list[int]] = {True: [], False: []}
    for shape in trained:
        groups[len(shape) >= 2].append(prod(shape))
    return [group for group in groups.values() if group]


def _touched(group: Sequence[int], own: int, ranks: int) -> int:
    """Numbers of the parameters of which a rank owns any: of the rank that has the most."""
    most = 0
    spans = list(zip(accumulate(group), group, strict=True))
    first = 0
    for rank in range(ranks):
        begin, end = own * rank, own * (rank + 1)
        while first < len(spans) and spans[first][0] <= begin:
            first += 1
        total, place = 0, first
        while place < len(spans) and spans[place][0] - spans[place][1] < end:
            total += spans[place][1]
            place += 1
        most = max(most, total)
    return most
