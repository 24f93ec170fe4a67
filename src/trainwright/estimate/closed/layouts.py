"""Layouts of one model: what they have in common is worked out once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from trainwright.anatomy.parts import Anatomy
from trainwright.errors import UserError
from trainwright.estimate.closed.memory_timeline import MemoryPoint
from trainwright.estimate.closed.parameter_memory import BYTES, Held, Parameters, keeps_fp32, parameters
from trainwright.estimate.closed.replay import ReplayedPasses, Reserved, replay
from trainwright.estimate.closed.short_model import micro_step, whole_micro_step
from trainwright.estimate.closed.static_memory import held
from trainwright.estimate.closed.step import SORTED_ABOVE, StepKey
from trainwright.estimate.closed.tape import Recording
from trainwright.estimate.request import Request

INDEX = 8
OPTIMIZER = "optimizer step"


@dataclass(frozen=True, slots=True)
class LayoutPeak:
    """The answer for one layout."""

    allocated_bytes: int
    reserved_bytes: int
    parts_bytes: dict[str, int]
    where: str
    evaluation_bytes: int | None


class Layouts:
    """One model in all its layouts."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self._courses: dict[StepKey, tuple[MemoryPoint, ...]] = {}
        self._recordings: dict[StepKey, Recording] = {}
        self._parameters: dict[Any, Parameters] = {}
        self._held: dict[Any, Held] = {}

    def peak(self, request: Request) -> LayoutPeak:
        """The highest point of a step.

        Raises:
            UserError: the family, or something that is asked for, has no closed form.
        """
        _require_covered(self.anatomy, request)
        found = self._parameters_of(request)
        there = self._held_by(request, found)
        samples = request.micro_batch_size
        parts = there.static | {"inputs": samples * self._inputs(request)}
        passing = sum(there.passing.values())
        best, highest = None, float(sum(there.update.values()))
        reserved = highest
        for point in self._course(asked_of(self.anatomy, request, there), found):
            total = point.total.real + samples * point.total.imag + passing
            idle = 0.0 if request.expandable_segments else point.idle.real + samples * point.idle.imag
            reserved = max(reserved, total + idle)
            if total > highest:
                best, highest = point, total
        for part, size in (there.update if best is None else there.passing).items():
            parts[part] = parts.get(part, 0) + size
        for part, line in best.parts.items() if best is not None else ():
            parts[part] = parts.get(part, 0) + round(line.real + samples * line.imag)
        allocated = sum(parts.values())
        return LayoutPeak(
            allocated,
            allocated + round(reserved - highest),
            {part: size for part, size in parts.items() if size},
            best.where if best is not None else OPTIMIZER,
            self._evaluation(request, found, there),
        )

    def reserved(self, request: Request) -> Reserved:
        """What the caching allocator takes for it, by every piece of the whole model.

        Raises:
            UserError: as `peak`.
        """
        _require_covered(self.anatomy, request)
        found = self._parameters_of(request)
        there = self._held_by(request, found)
        asked = asked_of(self.anatomy, request, there)
        first, last, evaluation = None, self._recording(asked, found), None
        if asked.accumulating and request.strategy == "fsdp2":
            first = self._recording(replace(asked, accumulating=False, synchronizes=asked.sync_each), found)
        elif asked.accumulating and request.strategy in ("single", "ddp"):
            first = last.as_first()
        if request.evaluation_batch_size is not None:
            evaluation = self._recording(_evaluating(asked), found)
        passes = ReplayedPasses(first, last, evaluation)
        return replay(self.anatomy, request, found, there, passes, self._inputs(request))

    def _evaluation(self, request: Request, found: Parameters, there: Held) -> int | None:
        """The highest point of a pass without gradients."""
        samples = request.evaluation_batch_size
        if samples is None:
            return None
        asked = _evaluating(asked_of(self.anatomy, request, there))
        highest = max(p.total.real + samples * p.total.imag for p in self._course(asked, found))
        return sum(there.static.values()) + samples * self._inputs(request) + round(highest)

    def _inputs(self, request: Request) -> int:
        """Token ids, labels, and a mask or positions where there are any, of one sample, or its pixels."""
        if request.auto_class == "AutoModelForSeq2SeqLM":
            return INDEX * (2 * request.sequence_length + (request.target_length or request.sequence_length))
        if self._pixels:
            return self._pixels * (4 if request.autocast else BYTES[request.base_dtype]) + INDEX
        places = request.has_mask or request.batch == "packed"
        return INDEX * (3 if places else 2) * request.sequence_length

    @cached_property
    def _pixels(self) -> int:
        """Numbers of one image; 0 for text."""
        if self.anatomy.image_tokens is None:
            return 0
        return sum(
            w.columns * (self.anatomy.image_tokens - 1) for _, w in self.anatomy.weights() if w.kind == "patches"
        )

    def _course(self, asked: StepKey, found: Parameters) -> tuple[MemoryPoint, ...]:
        course = self._courses.get(asked)
        if course is None:
            course = self._courses[asked] = micro_step(self.anatomy, asked, found)
        return course

    def _recording(self, asked: StepKey, found: Parameters) -> Recording:
        recording = self._recordings.get(asked)
        if recording is None:
            recording = self._recordings[asked] = whole_micro_step(self.anatomy, asked, found)
        return recording

    def _parameters_of(self, request: Request) -> Parameters:
        method = request.method
        targets = method.targets if isinstance(method.targets, str) else tuple(method.targets)
        key = (method.type, method.r, targets, tuple(method.freeze), request.base_dtype)
        found = self._parameters.get(key)
        if found is None:
            found = self._parameters[key] = parameters(self.anatomy, request)
        return found

    def _held_by(self, request: Request, found: Parameters) -> Held:
        method = request.method
        key = (
            id(found),
            request.base_dtype,
            request.precision,
            method.adapter_dtype,
            method.upcast_frozen,
            request.optimizer,
            request.strategy,
            request.offload,
            request.world_size,
            request.recipe,
            request.gradient_accumulation_steps > 1,
            request.sync_each_micro_batch,
            request.compute_capability[0],
        )
        there = self._held.get(key)
        if there is None:
            there = self._held[key] = held(self.anatomy, request, found)
        return there


def _require_covered(anatomy: Anatomy, request: Request) -> None:
    problems = [f"fused_kernels: {', '.join(request.fused_kernels)}"] if request.fused_kernels else []
    problems += ["strategy: fsdp1"] if request.strategy == "fsdp1" else []
    problems += [f"{name}: true" for name in ("separate_experts", "repeated_heads") if getattr(request, name)]
    problems += ["method.upcast_frozen: trl"] if request.method.upcast_frozen == "trl" else []
    if anatomy.family.positions == "buckets" and request.gradient_checkpointing == "reentrant":
        problems.append(f"gradient_checkpointing: reentrant, for {anatomy.family.name}")
    if problems:
        raise UserError(
            "this has no closed form", problems=problems, hints=["the traced step (trainwright.estimate.trace) has all"]
        )


def _evaluating(asked: StepKey) -> StepKey:
    """The pass without gradients beside a micro-step."""
    return replace(
        asked,
        training=False,
        checkpointing="none",
        accumulating=False,
        sync_each=False,
        strategy={"ddp": "single", "zero1": "zero3", "zero2": "zero3"}.get(asked.strategy, asked.strategy),
        kept_bytes=0,
        alone=False,
        long=False,
    )


def asked_of(anatomy: Anatomy, request: Request, there: Held) -> StepKey:
    """What of a request decides the course of its micro-steps: all that does, and nothing else, as each is run once."""
    method = request.method
    length = anatomy.image_tokens or request.sequence_length
    tokens = request.micro_batch_size * request.sequence_length
    return StepKey(
        family=anatomy.family,
        precision=request.precision,
        base=request.base_dtype,
        method=method.type,
        rank=method.r,
        targets=method.targets if isinstance(method.targets, str) else tuple(method.targets),
        freeze=tuple(method.freeze),
        storage=request.quant_storage,
        kept_fp32=keeps_fp32(anatomy, request),
        reshards=request.reshard_after_forward,
        upcast=method.upcast_frozen != "none",
        dropout=method.dropout,
        adapter=method.adapter_dtype,
        autocast=request.autocast,
        length=length,
        target_length=request.target_length or length,
        batch=request.seen_batch,
        learned_share=request.learned_share,
        checkpointing=request.gradient_checkpointing,
        attention=anatomy.attention_for(request.attention),
        capability=request.compute_capability,
        recipe=request.recipe,
        training=True,
        accumulating=request.gradient_accumulation_steps > 1 and request.strategy not in ("zero2", "zero3"),
        sync_each=request.sync_each_micro_batch,
        strategy=request.strategy,
        ranks=request.world_size if request.strategy == "fsdp2" else 1,
        kept_bytes=there.update.get("gradients", 0) if request.strategy in ("zero1", "zero2") else 0,
        output_is_scaled=anatomy.output_is_scaled,
        alone=anatomy.family.positions == "buckets" and request.micro_batch_size == 1,
        long=method.type == "full" and tokens > SORTED_ABOVE,
    )
