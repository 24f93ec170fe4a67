"""What a model is made of: its weights and attentions in the order in which a sample passes through them.

Shapes: a matrix has `rows` outputs and `columns` inputs, `copies` of it stand in one module (the experts of a layer).
Data flows between operations over named values. "tokens" is the residual stream, "source" that of an encoder and
"memory" what the encoder hands to the decoder; these live as long as the pass. All other names ("normed", "q", "inner")
live within one segment. Who reads and writes what decides where gradients must flow, and so what a backward pass costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Final, Literal

from trainwright.anatomy.family import Family

Part = Literal[
    "embedding",
    "query",
    "key",
    "value",
    "query_key_value",
    "attention",
    "attention_output",
    "mlp",
    "router",
    "experts",
    "norm",
    "head",
    "vision",
    "bias",
    "adapters",
]
"""`attention` is the products with keys and values, which have no weights; `vision` is what text never passes."""

Kind = Literal["linear", "conv1d", "patches", "embedding", "router", "experts", "norm", "parameter"]
"""How transformers stores it: `conv1d` is GPT-2's transposed linear, `patches` a convolution over an image, `router`
and `experts` are matrices outside of any `nn.Linear`, `parameter` is a bare tensor."""

Over = Literal["tokens", "source", "patches", "samples", "nothing"]
"""How often a matrix is applied: to each token, each token of the encoder, each image patch, once a sample, never."""

MATMUL_KINDS: Final = frozenset({"linear", "conv1d", "patches", "router", "experts"})
LASTING: Final = frozenset({"tokens", "source", "memory"})


@dataclass(frozen=True, slots=True)
class ModuleWeight:
    """One module with weights; `name` is its path inside of its segment."""

    name: str
    part: Part
    kind: Kind
    rows: int
    columns: int
    bias: bool = False
    copies: int = 1
    active: int = 1
    """Copies that one token passes: the experts chosen for it."""
    over: Over = "tokens"
    reads: str = "normed"
    writes: tuple[str, ...] = ("tokens",)
    begins: bool = False
    """It starts the stream that it writes, instead of adding to it."""
    tied_to: str | None = None
    """Full path of the module whose weight this one shares; it then has none of its own."""
    shape: tuple[int, ...] | None = None
    """Shape of the tensor where `kind` does not tell it."""

    @property
    def is_matmul(self) -> bool:
        """Whether applying it is a matrix product; the rest costs no FLOPs that are counted."""
        return self.kind in MATMUL_KINDS

    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight as transformers stores it."""
        if self.shape is not None:
            return self.shape
        match self.kind:
            case "norm" | "parameter":
                return (self.columns,)
            case "conv1d":
                return (self.columns, self.rows)
            case "experts":
                return (self.copies, self.rows, self.columns)
            case _:
                return (self.rows, self.columns)

    def parameters(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Full name and shape of each tensor that it owns."""
        if self.tied_to is not None:
            return
        path = join(prefix, self.name)
        yield path if self.kind in ("experts", "parameter") else f"{path}.weight", self.weight_shape()
        if self.bias:
            yield f"{path}.bias", (self.columns if self.kind == "norm" else self.rows,)


@dataclass(frozen=True, slots=True)
class Attention:
    """The two products of one attention: queries with keys, and the weights that result with values."""

    heads: int
    key_value_heads: int
    head_dim: int
    causal: bool = True
    window: int | None = None
    """A token sees this many tokens back, itself among them; None: all."""
    rotary: float = 0.0
    """Share of each head of queries and keys that rotary embeddings turn; 0: they do not."""
    queries_over: Over = "tokens"
    keys_over: Over = "tokens"


Operation = ModuleWeight | Attention


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive operations under one path: a layer, or what stands before, between or after the layers."""

    prefix: str
    operations: tuple[Operation, ...]
    is_layer: bool = False
    """One of the repeated blocks: the unit of gradient checkpointing and of sharding."""
    dropout: bool = False
    """Its last result passes a dropout."""

    @property
    def replays_last(self) -> bool:
        """Whether recomputing it repeats even its last product.

        It does when something after that (dropout, norm, the weights of experts) keeps the product's result for the
        backward pass. Otherwise torch stops before (`set_checkpoint_early_stop` in `torch/utils/checkpoint.py`).
        """
        last = self.operations[-1]
        ends_with_product = isinstance(last, ModuleWeight) and last.is_matmul and last.kind != "experts"
        return self.dropout or not ends_with_product


@dataclass(frozen=True)
class Anatomy:
    """A model, segment by segment in the order of its forward pass."""

    family: Family
    segments: tuple[Segment, ...]
    output: str | None
    """Path of the output embedding, which peft's `all-linear` and 4-bit loading both leave alone."""
    image_tokens: int | None = None
    """Tokens of one sample where the config fixes them (an image: its patches and the class token)."""
    output_is_scaled: bool = False
    """T5's, before its output embedding."""

    def attention_for(self, asked: str) -> str:
        """Return the attention that is computed where `asked` is asked for."""
        return "eager" if self.family.attention_is_eager else asked

    @property
    def layers(self) -> tuple[Segment, ...]:
        """The repeated blocks, encoder first."""
        return tuple(segment for segment in self.segments if segment.is_layer)

    def weights(self) -> Iterator[tuple[str, ModuleWeight]]:
        """Every module with weights and its full path; tied ones too."""
        for segment in self.segments:
            for operation in segment.operations:
                if isinstance(operation, ModuleWeight):
                    yield join(segment.prefix, operation.name), operation

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by the name that transformers gives it, shared tensors once."""
        return {
            name: shape
            for segment in self.segments
            for operation in segment.operations
            if isinstance(operation, ModuleWeight)
            for name, shape in operation.parameters(segment.prefix)
        }

    @cached_property
    def parameter_count(self) -> int:
        """Number of parameters, shared ones once."""
        return sum(prod(shape) for shape in self.parameters().values())


def join(prefix: str, name: str) -> str:
    """A dotted path of two parts, the first of which may be empty."""
    return f"{prefix}.{name}" if prefix else name


def linear(
    name: str,
    part: Part,
    columns: int,
    rows: int,
    *,
    bias: bool = False,
    reads: str = "normed",
    writes: str | tuple[str, ...] = "tokens",
    over: Over = "tokens",
    kind: Kind = "linear",
    tied_to: str | None = None,
) -> ModuleWeight:
    """A matrix from `columns` inputs to `rows` outputs."""
    written = (writes,) if isinstance(writes, str) else writes
    return ModuleWeight(
        name, part, kind, rows, columns, bias=bias, reads=reads, writes=written, over=over, tied_to=tied_to
    )


def norm(
    name: str, size: int, *, bias: bool = False, reads: str = "tokens", writes: str = "normed", over: Over = "tokens"
) -> ModuleWeight:
    """A normalisation with a scale, and with a shift when `bias`."""
    return ModuleWeight(name, "norm", "norm", 1, size, bias=bias, reads=reads, writes=(writes,), over=over)


def embedding(name: str, count: int, size: int, *, writes: str = "tokens", begins: bool = False) -> ModuleWeight:
    """A table of `count` vectors; `begins` when it starts the stream that it writes."""
    return ModuleWeight(name, "embedding", "embedding", count, size, reads="ids", writes=(writes,), begins=begins)


def parameter(name: str, part: Part, *shape: int, writes: str = "tokens") -> ModuleWeight:
    """A bare tensor."""
    return ModuleWeight(name, part, "parameter", 1, shape[-1], reads="ids", writes=(writes,), shape=shape)
