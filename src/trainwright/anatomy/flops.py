"""Floating-point operations of one step of one process: forward, backward and recomputation, by part.

A product of (m x k) and (k x n) is 2*m*k*n operations. Norms, activations, softmax, rotary embeddings and the optimizer
are not counted, as torch's FlopCounterMode does not count them either; they are bound by memory, not by arithmetic.

Where a gradient must flow is followed operation by operation: a frozen weight has no gradient of its own (LoRA: two
thirds of a full step), and nothing is computed below the first thing that is trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from trainwright.anatomy.adapters import Adapter, Lora, adapters
from trainwright.anatomy.parameters import path_of, trainable_parameters
from trainwright.anatomy.parts import LASTING, Anatomy, Attention, ModuleWeight, Operation, Over, Part, Segment

Kernel = Literal["fused", "eager"]
"""`fused` (flash, memory-efficient, cuDNN) computes the scores again in the backward pass; `eager` keeps them."""

Masked = Literal["counted", "skipped"]
"""Pairs of tokens that the mask hides: `counted` like FlopCounterMode and like kernels that compute them in vain;
`skipped` like flash attention, which leaves out the blocks above the diagonal and outside of the window."""


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """What one forward pass gets: samples of `length` tokens each, and `source_length` for an encoder-decoder.

    Where the model fixes the length (images), `length` is not used.
    """

    samples: int
    length: int = 0
    source_length: int = 0

    def counts(self, anatomy: Anatomy) -> dict[Over, int]:
        """How often a matrix is applied."""
        length = anatomy.image_tokens or self.length
        return {
            "tokens": self.samples * length,
            "source": self.samples * self.source_length,
            "patches": self.samples * (length - 1),
            "samples": self.samples,
            "nothing": 0,
        }


@dataclass(frozen=True)
class StepFlops:
    """Operations of one forward and backward pass, by part."""

    forward: Mapping[Part, int]
    backward: Mapping[Part, int]
    recompute: Mapping[Part, int]

    @property
    def total(self) -> int:
        """All operations that are executed."""
        return sum(sum(phase.values()) for phase in (self.forward, self.backward, self.recompute))

    @property
    def without_recompute(self) -> int:
        """What model FLOPs utilisation (MFU) counts."""
        return sum(self.forward.values()) + sum(self.backward.values())


@dataclass(frozen=True, slots=True)
class _Training:
    """What is trained of one operation."""

    weight: bool = False
    anything: bool = False
    adapter: Adapter | None = None


_FROZEN: Final = _Training()
_ATTENDED: Final = frozenset({"q", "k", "v"})


def step_flops(
    anatomy: Anatomy,
    batch: ForwardInput,
    *,
    lora: Lora | None = None,
    freeze: Sequence[str] = (),
    checkpointing: bool = False,
    kernel: Kernel = "fused",
    masked: Masked = "counted",
) -> StepFlops:
    """Operations of a forward and a backward pass over one micro-batch.

    With `checkpointing` every layer is computed again in the backward pass (torch's non-reentrant kind), up to the last
    result that the backward pass needs. transformers then also asks for gradients of the embedded tokens
    (`enable_input_require_grads`), so that they flow through every layer, however much is frozen.

    Raises:
        UserError: adapters or freeze patterns that match nothing.
    """
    if anatomy.family.attention_is_eager:
        kernel = "eager"
    measure = _Measure(anatomy, batch, kernel, masked, checkpointing)
    forward: Counter[Part] = Counter()
    backward: Counter[Part] = Counter()
    recompute: Counter[Part] = Counter()
    flowing: set[str] = set()
    seen: dict[object, tuple[_Passed, frozenset[str]]] = {}
    for segment, training in _training_of(anatomy, lora, freeze):
        # Layers of one kind share their operations: each kind is worked out once for each way gradients reach it.
        key = (id(segment.operations), training, frozenset(flowing))
        if key not in seen:
            reached = set(flowing)
            seen[key] = measure.segment(segment, training, reached), frozenset(reached)
        passed, after = seen[key]
        flowing = set(after)
        forward.update(passed.forward)
        backward.update(passed.backward)
        if checkpointing and segment.is_layer and passed.backward:
            recompute.update(passed.replayed)
    return StepFlops(dict(forward), dict(backward), dict(recompute))


@dataclass(frozen=True)
class _Passed:
    forward: Counter[Part]
    backward: Counter[Part]
    replayed: Counter[Part]


def _training_of(
    anatomy: Anatomy, lora: Lora | None, freeze: Sequence[str]
) -> list[tuple[Segment, tuple[_Training, ...]]]:
    """What is trained of every operation, segment by segment."""
    chosen = adapters(anatomy, lora) if lora else {}
    trained = frozenset() if lora else frozenset(trainable_parameters(anatomy, freeze))

    def training(segment: Segment, operation: Operation) -> _Training:
        if isinstance(operation, Attention):
            return _FROZEN
        path = path_of(segment, operation)
        owner = operation.tied_to or path
        weight = owner in trained or f"{owner}.weight" in trained
        return _Training(weight, weight or f"{path}.bias" in trained, chosen.get(path))

    return [
        (segment, tuple(training(segment, operation) for operation in segment.operations))
        for segment in anatomy.segments
    ]


@dataclass(frozen=True)
class _Measure:
    """Counts the operations of one segment for one batch."""

    anatomy: Anatomy
    batch: ForwardInput
    kernel: Kernel
    masked: Masked
    checkpointing: bool

    def segment(self, segment: Segment, training: tuple[_Training, ...], flowing: set[str]) -> _Passed:
        """Operations of one segment; `flowing` names the values that need a gradient, and is brought up to date."""
        counts = self.batch.counts(self.anatomy)
        forward: Counter[Part] = Counter()
        backward: Counter[Part] = Counter()
        skipped: Counter[Part] = Counter()
        for operation, trained in zip(segment.operations, training, strict=True):
            if isinstance(operation, Attention):
                pairs = self._pairs(operation)
                product = 2 * self.batch.samples * operation.heads * operation.head_dim * pairs
                forward["attention"] += 2 * product
                backward["attention"] += product * self._attention_gradients(flowing)
                if flowing & _ATTENDED:
                    flowing.add("heads")
                flowing -= _ATTENDED
                continue
            if operation.is_matmul:
                skipped = self._matmul(operation, trained, counts[operation.over], flowing, forward, backward)
            elif trained.adapter:
                # An adapted embedding looks A up and multiplies by B; B and the rows of A that were used get gradients.
                lookup = 2 * counts[operation.over] * trained.adapter.rank * operation.columns
                forward["adapters"] += lookup
                backward["adapters"] += 2 * lookup
            if operation.begins:
                flowing -= set(operation.writes)
            asked_for = self.checkpointing and operation.begins
            if trained.anything or trained.adapter or asked_for or operation.reads in flowing:
                flowing |= set(operation.writes)
        flowing &= LASTING
        replayed = forward if segment.replays_last else forward - skipped
        return _Passed(+forward, +backward, +replayed)

    def _matmul(
        self,
        weight: ModuleWeight,
        trained: _Training,
        count: int,
        flowing: set[str],
        forward: Counter[Part],
        backward: Counter[Part],
    ) -> Counter[Part]:
        """Add one matrix; return what a recomputation that ends with it leaves out."""
        product = 2 * count * weight.active * weight.rows * weight.columns
        reached = weight.reads in flowing
        forward[weight.part] += product
        adapter = trained.adapter
        if adapter is None:
            backward[weight.part] += product * (reached + trained.weight)
            return Counter({weight.part: product})
        if weight.kind in ("router", "experts"):
            # peft adds B*A to the tensor itself, so that its full gradient is computed after all. torch evaluates the
            # sum of stacked experts once more when peft registers it (`torch.nn.utils.parametrize`).
            merged = 2 * adapter.copies * adapter.rank * adapter.rows * adapter.columns
            forward["adapters"] += merged * (2 if weight.kind == "experts" else 1)
            backward["adapters"] += 2 * merged
            backward[weight.part] += product * (reached + 1)
            return Counter()
        into, out = 2 * count * adapter.rank * adapter.columns, 2 * count * adapter.rank * adapter.rows
        forward["adapters"] += into + out
        backward["adapters"] += into * (1 + reached) + 2 * out
        backward[weight.part] += product * reached
        return Counter({"adapters": out})

    def _attention_gradients(self, flowing: set[str]) -> int:
        """Products in the backward pass of one attention: of the values, the scores, the queries, the keys."""
        reached = flowing & _ATTENDED
        if not reached:
            return 0
        if self.kernel == "fused":
            return 5
        return ("v" in reached) + bool(reached & {"q", "k"}) + ("q" in reached) + ("k" in reached)

    def _pairs(self, attention: Attention) -> int:
        """Pairs of a query and a key in one sample and head."""
        lengths = {"tokens": self.anatomy.image_tokens or self.batch.length, "source": self.batch.source_length}
        queries, keys = lengths[attention.queries_over], lengths[attention.keys_over]
        if self.masked == "counted" or not attention.causal:
            return queries * keys
        window = min(attention.window or keys, keys)
        return window * (window + 1) // 2 + (queries - window) * window
