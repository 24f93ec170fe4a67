"""Seconds that one GPU computes for one micro-batch, by kernel class: forward, recomputation, backward.

Operations come exact from `anatomy.flops`, part by part; the rate of each part from the shapes of its matrices. Layers
of one kind are worked out once: the second of each kind stands for all that follow, as the first may pass less
(nothing is trained below it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from trainwright.anatomy.adapters import Adapter, Lora, adapters
from trainwright.anatomy.flops import ForwardInput, StepFlops, step_flops
from trainwright.anatomy.parameters import path_of
from trainwright.anatomy.parts import Anatomy, Attention, ModuleWeight, Over, Part, Segment
from trainwright.estimate.request import Request
from trainwright.estimate.time import traffic
from trainwright.estimate.time.attention import adds_bias, attention_kernel, attention_pairs, takes_mask
from trainwright.estimate.time.kernels import attention_s, matmul_s, stream_s
from trainwright.estimate.time.rates import Arithmetic, Speed
from trainwright.estimate.time.size import is_packed, layer_kinds, lora_of, shortened

NF4_BYTES = 0.52
"""Of one packed weight with its scales (`anatomy.quantized`)."""
NF4_KERNELS = 3
"""Unpack the scales, shift them, unpack the weights (bitsandbytes/functional.py, `dequantize_4bit`)."""
_NF4_HOST = (6, 9)
"""Python around them, forward and backward: on a core of an EPYC (bitsandbytes 0.50) a packed linear layer takes 185
and 131 microseconds of the processor more than a plain one, as long as 9 and 12 kernels of these passes take there."""


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Seconds by kernel class, and the number of kernels that are launched.

    `host_kernels` is what the host does besides, in kernels that it could launch meanwhile.
    """

    matmul_s: float = 0.0
    attention_s: float = 0.0
    memory_s: float = 0.0
    kernels: float = 0.0
    host_kernels: float = 0.0

    @property
    def seconds(self) -> float:
        """Of all kernels."""
        return self.matmul_s + self.attention_s + self.memory_s

    @property
    def launched(self) -> float:
        """Kernels that the host could launch in the time that it needs."""
        return self.kernels + self.host_kernels

    def __add__(self, other: PhaseTime) -> PhaseTime:
        return PhaseTime(
            self.matmul_s + other.matmul_s,
            self.attention_s + other.attention_s,
            self.memory_s + other.memory_s,
            self.kernels + other.kernels,
            self.host_kernels + other.host_kernels,
        )

    def times(self, factor: float) -> PhaseTime:
        """The same, `factor` times."""
        return PhaseTime(
            self.matmul_s * factor,
            self.attention_s * factor,
            self.memory_s * factor,
            self.kernels * factor,
            self.host_kernels * factor,
        )


@dataclass(frozen=True, slots=True)
class TimedPasses:
    """The passes over one micro-batch."""

    forward: PhaseTime
    recompute: PhaseTime
    backward: PhaseTime


@dataclass(frozen=True, slots=True)
class _Block:
    """Segments that are passed `count` times, with the operations that they add."""

    segments: tuple[Segment, ...]
    flops: StepFlops
    count: int


def arithmetic_of(request: Request, speed: Speed) -> Arithmetic:
    """What the products of the base model are computed in."""
    dtype = request.precision if request.autocast else request.base_dtype
    if dtype == "fp32":
        return "tf32" if request.tf32 and "tf32" in speed.matmul else "fp32"
    return "bf16" if dtype == "bf16" else "fp16"


def batch_of(anatomy: Anatomy, request: Request) -> ForwardInput:
    """The micro-batch, in the words of the anatomy."""
    kinds = {id(segment.operations): segment for segment in anatomy.segments}
    source = any(map(_over_source, kinds.values()))
    length = (request.target_length or request.sequence_length) if source else request.sequence_length
    return ForwardInput(request.micro_batch_size, length, request.sequence_length if source else 0)


def micro_batch(anatomy: Anatomy, request: Request, speed: Speed) -> TimedPasses:
    """Work out the passes over one micro-batch."""
    batch = batch_of(anatomy, request)
    lora = lora_of(request.method)
    forward, recompute, backward = PhaseTime(), PhaseTime(), PhaseTime()
    kinds = layer_kinds(anatomy)
    chosen = adapters(shortened(anatomy, (layer for found in kinds for layer in found[:2])), lora) if lora else {}
    for block in _blocks(anatomy, request, speed, batch, lora, kinds):
        adapted = tuple(_adapted(block, chosen)) if chosen else ()
        made = _Timing(anatomy, request, speed, batch, block, adapted).phases()
        forward += made[0].times(block.count)
        recompute += made[1].times(block.count)
        backward += made[2].times(block.count)
    return TimedPasses(forward, recompute, backward)


def _over_source(segment: Segment) -> bool:
    return any(isinstance(o, ModuleWeight) and o.over == "source" for o in segment.operations)


def _adapted(block: _Block, chosen: Mapping[str, Adapter]) -> Iterator[tuple[ModuleWeight, Adapter]]:
    for segment in block.segments:
        for operation in segment.operations:
            if isinstance(operation, ModuleWeight) and (found := chosen.get(path_of(segment, operation))):
                yield operation, found


def _blocks(
    anatomy: Anatomy, request: Request, speed: Speed, batch: ForwardInput, lora: Lora | None, kinds: list[list[Segment]]
) -> Iterator[_Block]:
    """The model without its repetitions, and then one more layer of each kind for all the others."""
    kernel, masked = attention_pairs(anatomy, request, speed, anatomy.image_tokens or max(batch.length, 1))

    def counted(short: Anatomy) -> StepFlops:
        return step_flops(
            short,
            batch,
            lora=lora,
            freeze=request.method.freeze,
            checkpointing=request.gradient_checkpointing != "none",
            kernel=kernel,
            masked=masked,
        )

    if request.method.freeze:  # its patterns may name single layers
        yield _Block(anatomy.segments, counted(anatomy), 1)
        return
    first = [found[0] for found in kinds]
    short = shortened(anatomy, first)
    once = counted(short)
    yield _Block(short.segments, once, 1)
    for found in kinds:
        if len(found) > 1:
            twice = counted(shortened(anatomy, [*first, found[1]]))
            yield _Block((found[1],), _less(twice, once), len(found) - 1)


def _less(more: StepFlops, less: StepFlops) -> StepFlops:
    def parts(a: Mapping[Part, int], b: Mapping[Part, int]) -> dict[Part, int]:
        return {part: count - b.get(part, 0) for part, count in a.items()}

    return StepFlops(
        parts(more.forward, less.forward), parts(more.backward, less.backward), parts(more.recompute, less.recompute)
    )


@dataclass(frozen=True)
class _Timing:
    """Turns the operations of one block into seconds."""

    anatomy: Anatomy
    request: Request
    speed: Speed
    batch: ForwardInput
    block: _Block
    adapted: tuple[tuple[ModuleWeight, Adapter], ...]
    """The matrices of this block that have an adapter."""

    def phases(self) -> tuple[PhaseTime, PhaseTime, PhaseTime]:
        """Forward, recomputation, backward."""
        flops = self.block.flops
        layers = any(segment.is_layer for segment in self.block.segments)
        moved, layer_moved = self._moved()
        forward = self._phase(flops.forward, backward=False)
        backward = self._phase(flops.backward, backward=True)
        recompute = self._phase(self._recomputed(), backward=False)
        forward += self._streamed(moved.forward, moved.forward_kernels) + self._unpacking(_NF4_HOST[0])
        if any(flops.backward.values()):
            backward += self._streamed(moved.backward, moved.backward_kernels) + self._unpacking(_NF4_HOST[1])
        else:
            backward = PhaseTime()
        if any(flops.recompute.values()) and layers:
            recompute += self._streamed(layer_moved.forward, layer_moved.forward_kernels)
            recompute += self._unpacking(_NF4_HOST[0])
        return forward, recompute, backward

    def _streamed(self, moved: float, kernels: float) -> PhaseTime:
        return PhaseTime(memory_s=stream_s(self.speed, moved, kernels), kernels=kernels)

    def _unpacking(self, host_kernels: int) -> PhaseTime:
        """What the host does around the unpacking of 4-bit weights."""
        return PhaseTime(host_kernels=host_kernels * sum(map(self._uses, self.block.segments)))

    def _uses(self, segment: Segment) -> int:
        """Number of matrices of a segment that are unpacked when they are used."""
        return sum(
            traffic.separate_copies(o, self.request)
            for o in segment.operations
            if isinstance(o, ModuleWeight) and is_packed(o, self.request)
        )

    @cached_property
    def _counts(self) -> Mapping[Over, int]:
        return self.batch.counts(self.anatomy)

    @cached_property
    def _matrices_by_part(self) -> Mapping[Part, Sequence[ModuleWeight]]:
        found: dict[Part, list[ModuleWeight]] = {}
        for segment in self.block.segments:
            for operation in segment.operations:
                if isinstance(operation, ModuleWeight) and operation.is_matmul:
                    found.setdefault(operation.part, []).append(operation)
        return found

    def _recomputed(self) -> Mapping[Part, int]:
        """Operations that are computed again: without the early stop of the non-reentrant kind, all of a layer's."""
        flops = self.block.flops
        if self.request.gradient_checkpointing != "reentrant" or not any(flops.recompute.values()):
            return flops.recompute
        return {part: count for part, count in flops.forward.items() if part not in ("head", "embedding")}

    def _phase(self, flops: Mapping[Part, int], *, backward: bool) -> PhaseTime:
        arithmetic = arithmetic_of(self.request, self.speed)
        total = PhaseTime()
        for part, count in flops.items():
            if not count:
                continue
            if part == "attention":
                total += PhaseTime(attention_s=self._attention(arithmetic, count, backward=backward), kernels=1)
            elif part == "adapters":
                kernels = len(self.adapted) * (4 if backward else 2)
                total += PhaseTime(matmul_s=self._adapters(count, backward=backward), kernels=kernels)
            else:
                total += self._matrices(part, arithmetic, count, backward=backward)
        return total

    def _matrices(self, part: Part, arithmetic: Arithmetic, flops: int, *, backward: bool) -> PhaseTime:
        """One part: each matrix its share of the operations, at the rate of its shape."""
        counts, weights = self._counts, self._matrices_by_part.get(part, ())
        sizes = [counts[w.over] * w.rows * w.columns * w.active for w in weights]
        whole = sum(sizes) or 1
        trained = self.request.method.type == "full"
        seconds, kernels = 0.0, 0
        for weight, size in zip(weights, sizes, strict=True):
            if not size:
                continue
            # A token passes `active` of the copies: each copy is a product over its own share of the tokens.
            tokens = max(1.0, counts[weight.over] * weight.active / weight.copies)
            separate = traffic.separate_copies(weight, self.request)
            out, into = weight.rows, weight.columns
            shapes: list[tuple[float, float, float]] = [(tokens, out, into)]
            if backward:
                shapes = [(tokens, into, out), (out, into, tokens)] if trained else [(tokens, into, out)]
            share = flops * size / whole / len(shapes)
            together = weight.copies // separate
            seconds += sum(matmul_s(self.speed, arithmetic, *shape, share, together=together) for shape in shapes)
            kernels += len(shapes) * separate
        return PhaseTime(matmul_s=seconds, kernels=kernels)

    def _attention(self, arithmetic: Arithmetic, flops: int, *, backward: bool) -> float:
        attentions = [o for s in self.block.segments for o in s.operations if isinstance(o, Attention)]
        first = attentions[0]
        length = self.anatomy.image_tokens or max(self.batch.length, 1)
        kernel = attention_kernel(self.anatomy, self.request, self.speed, first, length)
        if kernel == "scores":
            heads = first.heads * self.batch.samples
            return matmul_s(self.speed, arithmetic, length, length, first.head_dim, flops, together=heads)
        return attention_s(
            self.speed,
            arithmetic,
            flops,
            length=length,
            window=first.window,
            backward=backward,
            kernel=kernel,
            causal=first.causal and not takes_mask(self.request, first, length),
            head_dim=first.head_dim,
        )

    def _adapters(self, flops: int, *, backward: bool) -> float:
        """Thin products: what they move counts more than what they compute."""
        counts = self._counts
        size = sum(counts[w.over] * a.rank * (w.rows + w.columns) for w, a in self.adapted) or 1
        kind: Arithmetic = arithmetic_of(self.request, self.speed)
        if not self.request.autocast and traffic.Widths.of(self.request).trained == 4:
            kind = "tf32" if self.request.tf32 and "tf32" in self.speed.matmul else "fp32"
        seconds = 0.0
        for weight, adapter in self.adapted:
            tokens = max(1, counts[weight.over])
            for rows, columns in ((adapter.rank, weight.columns), (weight.rows, adapter.rank)):
                share = flops * tokens * rows * columns / size
                shape = (tokens, columns, rows) if backward else (tokens, rows, columns)
                seconds += matmul_s(self.speed, kind, *shape, share)
        return seconds

    def _moved(self) -> tuple[traffic.Moved, traffic.Moved]:
        """Between the products: of all segments, and of the layers among them."""
        widths, counts = traffic.Widths.of(self.request), self._counts
        inside, outside = traffic.Moved(), traffic.Moved()
        for segment in self.block.segments:
            found = traffic.layer(self.anatomy, segment, self.request, widths, counts)
            found += self._weights_used(segment, widths)
            for operation in segment.operations:
                if isinstance(operation, Attention):
                    found += self._scores(operation, segment, widths)
                elif operation.part == "head" and operation.is_matmul:
                    found += traffic.loss(self.request, widths, counts[operation.over], operation.rows)
                    found += traffic.Moved(0, 0, traffic.AROUND_LAYERS, traffic.AROUND_LAYERS / 2)
            if segment.is_layer:
                inside += found
            else:
                outside += found
        for weight, adapter in self.adapted:
            inside += traffic.adapted(adapter, widths, self.request, counts[weight.over])
        return inside + outside, inside

    def _scores(self, attention: Attention, segment: Segment, widths: traffic.Widths) -> traffic.Moved:
        own = self.anatomy.image_tokens or max(self.batch.length, 1)
        counts = {"tokens": own, "source": self.batch.source_length}
        lengths = (counts[attention.queries_over], counts[attention.keys_over])
        if attention_kernel(self.anatomy, self.request, self.speed, attention, own) == "scores":
            drops = traffic.drops(self.anatomy, segment)
            return traffic.eager_scores(attention, widths, self.request, self.batch.samples, lengths, dropout=drops)
        bias = adds_bias(self.anatomy, attention)
        if bias or takes_mask(self.request, attention, own):
            return traffic.masked_scores(attention, widths, self.batch.samples, lengths, bias=bias)
        return traffic.Moved()

    def _weights_used(self, segment: Segment, widths: traffic.Widths) -> traffic.Moved:
        """Weights that are cast, or unpacked from 4 bits, each time that they are used, and gradients cast back."""
        matrices = [o for o in segment.operations if isinstance(o, ModuleWeight) and o.is_matmul]
        c, request = widths.compute, self.request
        if request.method.type == "qlora":
            packed = sum(w.rows * w.columns * w.copies for w in matrices if is_packed(w, request))
            return traffic.Moved(NF4_BYTES + c, NF4_BYTES + c, NF4_KERNELS, NF4_KERNELS).times(
                packed, self._uses(segment)
            )
        if request.autocast and widths.weight == 4 and c == 2 and request.strategy in ("single", "ddp"):
            whole = sum(w.rows * w.columns * w.copies for w in matrices)
            cast, trained = traffic.CAST_BYTES, request.method.type == "full"
            casts = sum(1 + w.bias for w in matrices)
            return traffic.Moved(cast, cast if trained else 0, casts, casts if trained else 0).times(whole)
        return traffic.Moved()
