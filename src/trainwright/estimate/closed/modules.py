"""Modules with weights: linear layers with their adapters, norms, embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainwright.anatomy.adapters import Adapter
from trainwright.anatomy.family import NormKind
from trainwright.anatomy.quantized import BLOCK
from trainwright.estimate.closed import operators as op
from trainwright.estimate.closed.tape import FP32, Size, Tape, TapeParameter, Tensor


@dataclass(slots=True)
class Module:
    """A module of the anatomy with its parameters; `columns` inputs, `rows` outputs."""

    rows: int
    columns: int
    weight: TapeParameter
    bias: TapeParameter | None = None
    adapter: tuple[TapeParameter, TapeParameter] | None = None
    packed: int | None = None
    """Dtype that a packed (4-bit) weight is unpacked to."""
    copies: int = 1
    chosen: int = 1

    def parameters(self) -> list[TapeParameter]:
        """All of them, adapters last."""
        return [w for w in (self.weight, self.bias, *(self.adapter or ())) if w is not None]


def linear(tape: Tape, module: Module, x: Tensor, *, training: bool, dropout: float) -> Tensor:
    """`nn.Linear`, GPT-2's `Conv1D`, bitsandbytes' `Linear4bit`, each with the adapter that peft puts around it."""
    bias = module.bias.tensor if module.bias is not None else None
    if module.packed is not None:
        out = _unpacked_product(tape, module, x, bias)
    else:
        out = op.product(tape, x, module.weight.tensor, module.rows, module.columns, bias)
    if module.adapter is None:
        return out
    a, b = module.adapter
    dtype = out.dtype
    if module.packed is not None:
        out = op.copy(tape, out)  # peft/tuners/lora/bnb.py clones the result
        if tape.autocast is None:
            x = op.to(tape, x, a.dtype)
    else:
        x = op.to(tape, x, a.dtype)
    rank = round(a.elements / module.columns)
    dropped = op.dropout(tape, x, dropout, training=training)
    inner = op.product(tape, dropped, a.tensor, rank, module.columns)
    del dropped
    low = op.product(tape, inner, b.tensor, module.rows, rank)
    del inner
    scaled = op.scale(tape, low)
    del low
    if module.packed is not None and tape.autocast is None:
        scaled = op.to(tape, scaled, dtype)
    out = op.add(tape, out, scaled)
    del scaled
    return op.to(tape, out, dtype)


def _unpacked_product(tape: Tape, module: Module, x: Tensor, bias: Tensor | None) -> Tensor:
    """bitsandbytes' `MatMul4Bit`: the weight is unpacked for the product and once more for the backward pass."""
    assert module.packed is not None
    own, compute = x.dtype, module.packed
    x = op.to(tape, x, compute)
    if bias is not None:
        bias = op.to(tape, bias, compute)
    tokens = x.elements / module.columns

    def unpack() -> Tensor:
        scales = tape.new(complex(-(-module.rows * module.columns // BLOCK)), FP32)
        weight = tape.new(complex(module.rows * module.columns), compute)
        del scales
        return weight

    weight = unpack()
    out = tape.new(tokens * module.rows, compute)
    tape.multiplies(backward=False)
    del weight
    if tape.needs_gradient(x):
        elements = x.elements

        def backward(g: Tensor) -> tuple[Tensor, None]:
            weight = unpack()
            result = tape.new(elements, compute)
            del weight
            return result, None

        out = tape.link(out, [x, None], backward)
    result = op.to(tape, out, own)
    del out  # before the cast input, which the frame holds to its end
    return result


def rms_norm(tape: Tape, module: Module, x: Tensor) -> Tensor:
    """`LlamaRMSNorm` and its copies: the rest in fp32, the scale in the dtype of the input."""
    rows, dtype = x.elements / module.columns, x.dtype
    x = op.to(tape, x, FP32)
    squares = op.power(tape, x)
    variance = op.mean(tape, squares, rows)
    del squares
    x = op.mul(tape, x, _inverse_root(tape, variance))
    return op.mul(tape, module.weight.tensor, op.to(tape, x, dtype))


def rms_norm_scaled_in_fp32(tape: Tape, module: Module, x: Tensor) -> Tensor:
    """`Olmo2RMSNorm`: all in fp32, the result in the dtype of the input."""
    dtype = x.dtype
    x = op.to(tape, x, FP32)
    squares = op.power(tape, x)
    variance = op.mean(tape, squares, x.elements / module.columns)
    del squares
    x = op.mul(tape, x, _inverse_root(tape, variance))
    return op.to(tape, op.mul(tape, module.weight.tensor, x), dtype)


def gemma_norm(tape: Tape, module: Module, x: Tensor) -> Tensor:
    """`GemmaRMSNorm`: scaled by one more than the weight, all in fp32."""
    dtype = x.dtype
    output = _normed(tape, module, op.to(tape, x, FP32))
    one_more = op.shift(tape, op.to(tape, module.weight.tensor, FP32))
    output = op.mul(tape, output, one_more)
    del one_more
    return op.to(tape, output, dtype)


def _normed(tape: Tape, module: Module, x: Tensor) -> Tensor:
    squares = op.power(tape, x)
    variance = op.mean(tape, squares, x.elements / module.columns)
    del squares
    return op.mul(tape, x, _inverse_root(tape, variance))


def layer_norm(tape: Tape, module: Module, x: Tensor) -> Tensor:
    """`nn.LayerNorm`."""
    shift = module.bias.tensor if module.bias is not None else None
    return op.layer_norm(tape, x, module.weight.tensor, shift, module.columns)


Norm = Callable[[Tape, Module, Tensor], Tensor]
NORMS: Mapping[NormKind, Norm] = {
    "rms": rms_norm,
    "rms_scaled_in_fp32": rms_norm_scaled_in_fp32,
    "rms_of_one_more": gemma_norm,
    "layer": layer_norm,
}


def _inverse_root(tape: Tape, variance: Tensor) -> Tensor:
    return op.elementwise(tape, op.shift(tape, variance), keep_output=True, temporaries=1)


def embedding(tape: Tape, module: Module, ids: Size, *, sorted_above: bool, indices: Tensor | None = None) -> Tensor:
    """`nn.Embedding`; `indices` are those that nobody else keeps."""
    return op.embedding(tape, module.weight.tensor, ids, module.columns, sorted_above=sorted_above, indices=indices)


def adapter_sizes(adapter: Adapter) -> tuple[int, int]:
    """Elements of A and B."""
    return adapter.copies * adapter.rank * adapter.columns, adapter.copies * adapter.rank * adapter.rows
