"""Mixtures of experts as transformers 5 computes them: tokens sorted by expert, grouped matrix products.

transformers/integrations/moe.py, `grouped_mm_experts_forward`; adapters on stacked experts are peft's `ParamWrapper`
(tuners/lora/layer.py), which adds their product to the whole tensor before it is used.
"""

from __future__ import annotations

from trainwright.estimate.closed import operators as op
from trainwright.estimate.closed.modules import Module
from trainwright.estimate.closed.step import Layer, StepPass
from trainwright.estimate.closed.tape import FP32, Size, Tape, Tensor

INDEX = 8


def mixture(step: StepPass, layer: Layer, hidden: Tensor) -> Tensor:
    """`MixtralSparseMoeBlock`; a shared expert beside the others in Qwen2-MoE."""
    if "mlp.shared_expert.gate_proj" not in layer:
        return experts(step, layer, hidden, *route(step, layer, hidden))
    shared = _shared_expert(step, layer, hidden)
    out = experts(step, layer, hidden, *route(step, layer, hidden))
    gate = op.elementwise(step.tape, step.linear(layer["mlp.shared_expert_gate"], hidden), keep_output=True)
    return op.add(step.tape, out, op.mul(step.tape, gate, shared))


def _shared_expert(step: StepPass, layer: Layer, hidden: Tensor) -> Tensor:
    tape, path = step.tape, "mlp.shared_expert"
    acted = op.elementwise(tape, step.linear(layer[f"{path}.gate_proj"], hidden))
    inner = op.mul(tape, acted, step.linear(layer[f"{path}.up_proj"], hidden))
    del acted
    return step.linear(layer[f"{path}.down_proj"], inner)


def route(step: StepPass, layer: Layer, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """`MixtralTopKRouter`: weights of the chosen experts, and which they are."""
    tape, gate = step.tape, layer["mlp.gate"]
    tokens = hidden.elements / gate.columns
    logits = op.product(tape, hidden, _matrix(tape, gate), gate.rows, gate.columns)
    odds = op.softmax(tape, op.to(tape, logits, FP32), to_fp32=True)
    chosen = layer["mlp.experts.gate_up_proj"].chosen
    best = op.part_of(tape, odds, tokens * chosen)
    weights = op.copy(tape, best)
    places = tape.new(tokens * chosen, INDEX)
    if not step.asked.family.weighs_experts_in_fp32:
        weights = op.to(tape, weights, logits.dtype)
    return weights, places


def experts(step: StepPass, layer: Layer, hidden: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """The chosen experts of all tokens, one row for each pair of token and expert."""
    tape = step.tape
    gate_up, down = layer["mlp.experts.gate_up_proj"], layer["mlp.experts.down_proj"]
    pairs, dtype = places.elements, hidden.dtype
    lowered = _Stacked(tape, down)
    lowered.look()
    joined = _Stacked(tape, gate_up)
    joined.look()
    order = [tape.new(pairs, INDEX) for _ in range(3)]
    chosen = _gathered(tape, hidden, pairs * gate_up.columns, order[0], pairs)
    sorted_weights = _gathered(tape, weights, pairs, order[1], pairs)
    inner = op.split(
        tape, _grouped(tape, chosen, joined.matrix(), pairs * gate_up.rows), (pairs * gate_up.rows / 2,) * 2
    )
    gate, up = inner
    acted = op.mul(tape, op.elementwise(tape, gate), up)
    del inner, gate, up
    projected = _grouped(tape, acted, lowered.matrix(), pairs * down.rows)
    del acted
    out = op.mul(tape, projected, sorted_weights)
    back = tape.new(pairs, INDEX)
    out = _gathered(tape, out, pairs * down.rows, back, pairs)
    total = op.copy(tape, out, hidden.elements)
    result = op.to(tape, total, dtype)
    del chosen, projected, out, total, joined, lowered  # sums of weights and adapters are cached to the end
    return result


class _Stacked:
    """The stacked matrices of all experts, with adapters added if there are any."""

    def __init__(self, tape: Tape, module: Module) -> None:
        self._tape, self._module = tape, module
        self._low: tuple[Tensor, Tensor] | None = None
        self._sum: Tensor | None = None
        if module.adapter is not None:
            a, b = module.adapter
            self._low = _cast_view(tape, a.tensor), _cast_view(tape, b.tensor)

    def look(self) -> None:
        """Registering the sum of weight and adapter computes it once."""
        if self._low is not None:
            self._tape.passing(self._module.weight.elements * complex(self._low[0].dtype), part="temporaries")

    def matrix(self) -> Tensor:
        """What is multiplied with; peft's sum stays (`torch.nn.utils.parametrize.cached`)."""
        self._sum = self._made()
        return self._sum

    def _made(self) -> Tensor:
        tape, weight = self._tape, self._module.weight
        if self._low is None:
            return weight.tensor
        a, b = self._low
        kept = tape.keep(a, b) if tape.needs_gradient(a, b) else None
        out = tape.new(complex(weight.elements), weight.dtype)
        if kept is None:
            return out
        sizes = a.elements, b.elements

        def backward(g: Tensor) -> tuple[Tensor, Tensor]:
            held = kept.unpack()
            results = tape.new(sizes[0], g.dtype), tape.new(sizes[1], g.dtype)
            del held
            return results

        return tape.link(out, [a, b], backward)


def _cast_view(tape: Tape, x: Tensor) -> Tensor:
    """Autocast's cast of a view of a weight, which it does not keep for the next time."""
    return x if tape.autocast is None else op.to(tape, x, tape.autocast)


def _matrix(tape: Tape, module: Module) -> Tensor:
    """A router's weight, with its adapter added if it has one."""
    if module.adapter is None:
        return module.weight.tensor
    a, b = module.adapter
    delta = op.scale(tape, op.multiply(tape, b.tensor, a.tensor, complex(module.weight.elements)))
    return op.add(tape, module.weight.tensor, delta)


def _grouped(tape: Tape, x: Tensor, weight: Tensor, elements: Size) -> Tensor:
    """`grouped_mm`, which autocast does not know: its input takes the dtype of the weights."""
    x = op.to(tape, x, weight.dtype)
    if not tape.needs_gradient(x, weight):
        return tape.new(elements, x.dtype)
    for_x, for_weight = x.node is not None, weight.node is not None
    kept = tape.keep(weight if for_x else None, x if for_weight else None)
    out = tape.new(elements, x.dtype)
    own, size, dtype = x.elements, weight.elements, x.dtype

    def backward(g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        held = kept.unpack()
        to_weight = tape.new(size, dtype) if for_weight else None
        to_x = tape.new(own, dtype) if for_x else None
        del held
        return to_x, to_weight

    return tape.link(out, [x, weight], backward)


def _gathered(tape: Tape, x: Tensor, elements: Size, places: Tensor, rows: Size) -> Tensor:
    """`x[places]`; the gradient is put into zeros."""
    if not tape.needs_gradient(x):
        return tape.new(elements, x.dtype)
    kept = tape.keep(places)
    out = tape.new(elements, x.dtype)
    full, dtype = x.elements, x.dtype

    def backward(g: Tensor) -> tuple[Tensor]:
        held = kept.unpack()
        zeros = tape.new(full, dtype)
        inner = [tape.new(rows, INDEX, "kernel temporaries") for _ in range(4)]
        result = tape.new(full, dtype)
        del zeros, inner, held
        return (result,)

    return tape.link(out, [x], backward)
