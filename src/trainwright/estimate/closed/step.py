"""One micro-step of a short model: what is asked, and the modules that it passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from trainwright.anatomy.family import Family
from trainwright.anatomy.parameters import path_of
from trainwright.anatomy.parts import Attention, Segment
from trainwright.anatomy.parts import ModuleWeight as Described
from trainwright.estimate.closed import attention as kernels
from trainwright.estimate.closed import modules
from trainwright.estimate.closed import operators as op
from trainwright.estimate.closed.modules import Module
from trainwright.estimate.closed.parameter_memory import Parameters
from trainwright.estimate.closed.sharding import Sharding
from trainwright.estimate.closed.tape import FP32, HALF, Size, Tape, TapeParameter, Tensor

BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "uint8": 1}
SAMPLES: Size = 1j
SORTED_ABOVE = 3072
"""Indices above which the backward pass of an embedding sorts them (aten/src/ATen/native/cuda/Embedding.cu)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKey:
    """What of a request decides the course of a micro-step; the size of the micro-batch does not."""

    family: Family
    precision: str
    base: str
    """Dtype of the weights that are not packed and not adapters."""
    method: str
    rank: int
    targets: str | tuple[str, ...]
    freeze: tuple[str, ...]
    storage: str
    """Dtype that packed weights are stored as."""
    kept_fp32: tuple[str, ...]
    """Endings of the modules whose weights stay fp32."""
    reshards: bool
    upcast: bool
    """Frozen weights became fp32."""
    dropout: float
    adapter: str
    autocast: bool
    length: int
    target_length: int
    batch: str
    learned_share: float
    checkpointing: str
    attention: str
    capability: tuple[int, int]
    recipe: str
    training: bool
    accumulating: bool
    """Gradients of an earlier micro-batch are there."""
    synchronizes: bool = True
    """FSDP2 reduces gradients, as it does in the last micro-batch of a step."""
    sync_each: bool = False
    """It does so in every one, and gradients of an earlier one are there as shards."""
    strategy: str
    ranks: int
    """That share the weights; 1 where the course does not depend on them."""
    kept_bytes: int
    """Gradients that ZeRO-1 and 2 copy out of their buckets."""
    output_is_scaled: bool
    alone: bool
    """There is one sample, which the bias of T5's attention is learned from as it is."""
    long: bool
    """Enough tokens for the backward pass of an embedding that is trained to sort them."""

    @property
    def half(self) -> int | None:
        """Dtype of autocast; None: it is off."""
        if not self.autocast or self.precision == "fp32":
            return None
        return HALF

    @property
    def weight_dtype(self) -> int:
        """Bytes of a weight as the forward pass sees it: FSDP2 gathers, and DeepSpeed holds, the compute dtype."""
        if self._in_compute_dtype:
            return HALF
        return FP32 if self.upcast else BYTES[self.base]

    @property
    def adapter_dtype(self) -> int:
        """Bytes of a number of an adapter, seen likewise."""
        return HALF if self._in_compute_dtype else (4 if self.adapter == "fp32" else BYTES[self.base])

    @property
    def _in_compute_dtype(self) -> bool:
        return self.strategy in ("fsdp2", "zero1", "zero2", "zero3") and self.precision != "fp32"


@dataclass(slots=True)
class Layer:
    """One segment's modules by name, and its attentions."""

    modules: dict[str, Module]
    attentions: tuple[Attention, ...]
    dropout: bool
    name: str

    def __getitem__(self, name: str) -> Module:
        return self.modules[name]

    def __contains__(self, name: str) -> bool:
        return name in self.modules

    def parameters(self) -> list[TapeParameter]:
        """All parameters, shared ones too."""
        return [weight for module in self.modules.values() for weight in module.parameters()]


@dataclass(slots=True)
class Shared:
    """What every layer is handed: masks of all pairs and of a window, positions, an encoder's result."""

    mask: Tensor | None = None
    window_mask: Tensor | None = None
    rope: tuple[Tensor, Tensor] | None = None
    window_rope: tuple[Tensor, Tensor] | None = None
    """Tables of the layers with a window, where these have their own."""
    memory: Tensor | None = None
    memory_mask: Tensor | None = None
    bias: Tensor | None = None
    cross_bias: Tensor | None = None
    lingering: Tensor | None = None
    """What the layer before returned besides, and its caller drops only when the next one has returned."""

    def rope_of(self, layer: Layer) -> tuple[Tensor, Tensor] | None:
        """The rotary tables of a layer."""
        windowed = any(attention.window is not None for attention in layer.attentions)
        return self.window_rope or self.rope if windowed else self.rope


@dataclass(slots=True)
class StepPass:
    """A pass under way."""

    tape: Tape
    asked: StepKey
    sharding: Sharding | None = None
    attention_weights: Tensor | None = None
    """What eager attention returns besides; the frame of the layer holds it to its end."""

    @property
    def training(self) -> bool:
        """Whether dropouts are active."""
        return self.asked.training

    def linear(self, module: Module, x: Tensor) -> Tensor:
        """Apply a linear layer with its adapter."""
        return modules.linear(self.tape, module, x, training=self.training, dropout=self.asked.dropout)

    def drop(self, x: Tensor, p: float) -> Tensor:
        """Apply a dropout."""
        return op.dropout(self.tape, x, p, training=self.training)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        shape: kernels.AttentionShape,
        *,
        causal: bool = True,
        dropout: float = 0.0,
        softcap: bool = False,
    ) -> Tensor:
        """Attention as the model's implementation computes it."""
        asked, tape = self.asked, self.tape
        if asked.attention == "eager":
            out, self.attention_weights = kernels.eager(
                tape, q, k, v, mask, shape, dropout=dropout, training=self.training, softcap=softcap
            )
            return out
        wanted = asked.attention
        if wanted == "flash_attention_2":
            wanted, mask = "flash", None
            q, k, v = (op.to(tape, x, HALF) for x in (q, k, v))
        v, k, q = (op.lower(tape, x) for x in (v, k, q))
        grouped = mask is None and shape.head <= 256
        dtype = q.dtype
        kernel = kernels.kernel_of(
            wanted, dtype, asked.precision, asked.capability, shape, masked=mask is not None, grouped=grouped
        )
        if kernel == "math":
            return kernels.math(
                tape, q, k, v, mask, shape, causal=causal and mask is None, dropout=dropout, training=self.training
            )
        out = kernels.fused(tape, kernel, q, k, v, mask, shape)
        del q, k, v  # casts go with the call; then transformers lays the result out token by token
        return op.copy(tape, out) if out.headed else out

    def repeats(self, mask: Tensor | None, shape: kernels.AttentionShape) -> bool:
        """Whether transformers repeats keys and values itself (integrations/sdpa_attention.py)."""
        if self.asked.attention == "eager":
            return False
        if self.asked.attention == "flash_attention_2":
            return False
        return shape.heads != shape.key_heads and (mask is not None or shape.head > 256)


def build_layer(segment: Segment, asked: StepKey, found: Parameters, shared: dict[str, Module]) -> Layer:
    """Make the modules of a segment; `shared` knows those whose weights others borrow."""
    modules_of: dict[str, Module] = {}
    attentions = []
    for operation in segment.operations:
        if isinstance(operation, Attention):
            attentions.append(operation)
            continue
        path = path_of(segment, operation)
        module = _module(operation, path, asked, found, shared)
        modules_of[operation.name] = shared[path] = module
    return Layer(modules_of, tuple(attentions), segment.dropout, segment.prefix)


def _module(described: Described, path: str, asked: StepKey, found: Parameters, shared: dict[str, Module]) -> Module:
    def trained(suffix: str) -> bool:
        return f"{path}{suffix}" in found.trained_names

    kept = asked.kept_fp32 and path.endswith(asked.kept_fp32)
    dtype = FP32 if kept else asked.weight_dtype
    stored = FP32 if kept or asked.upcast else BYTES[asked.base]
    if described.tied_to is not None:
        weight = shared[described.tied_to].weight
    else:
        own = path if described.kind in ("experts", "parameter") else f"{path}.weight"
        shape = described.weight_shape()
        weight = TapeParameter(prod(shape), dtype, shape[0], trained=own in found.trained_names, stored=stored)
    module = Module(described.rows, described.columns, weight, copies=described.copies, chosen=described.active)
    if described.bias:
        size = described.columns if described.kind == "norm" else described.rows
        module.bias = TapeParameter(size, dtype, size, trained=trained(".bias"), stored=stored)
    if path in found.packed_paths:
        packed = found.packed_paths[path] // 2 // BYTES[asked.storage]
        module.weight = TapeParameter(packed, BYTES[asked.storage], packed, trained=False)
        module.packed = BYTES[asked.precision]
    adapter = found.adapted.get(path)
    if adapter is not None:
        a, b = modules.adapter_sizes(adapter)
        ranks = adapter.copies * adapter.rank
        stored = FP32 if asked.adapter == "fp32" else BYTES[asked.base]
        module.adapter = (
            TapeParameter(a, asked.adapter_dtype, ranks, trained=True, stored=stored),
            TapeParameter(b, asked.adapter_dtype, adapter.rows, trained=True, stored=stored),
        )
    return module
