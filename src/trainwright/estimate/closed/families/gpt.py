"""Layers with layer norms and a plain MLP: GPT-2, GPT-BigCode, StarCoder2, Phi-1 and 2, GPT-NeoX, OPT."""

from __future__ import annotations

from trainwright.estimate.closed import modules
from trainwright.estimate.closed import operators as op
from trainwright.estimate.closed.families.llama import (
    attend,
    heads,
    joined_again,
    rotated,
    shape_of,
    turned_apart,
)
from trainwright.estimate.closed.step import Layer, Shared, StepPass
from trainwright.estimate.closed.tape import Tape, Tensor

GPT2_DROPOUT = 0.1
"""`attn_pdrop`, `resid_pdrop` and `embd_pdrop` of GPT-2 and GPT-BigCode, and `dropout` of OPT."""


def gpt2_layer(step: StepPass, layer: Layer, hidden: Tensor, shared: Shared) -> Tensor:
    """`GPT2Block`, and `GPTBigCodeBlock`, which has one head of keys and values."""
    tape, p = step.tape, GPT2_DROPOUT if layer.dropout else 0.0
    residual = hidden
    hidden = modules.layer_norm(tape, layer["ln_1"], hidden)
    attended = _joined_attention(step, layer, hidden, shared, p)
    hidden = op.add(tape, attended, residual)
    residual = hidden
    hidden = modules.layer_norm(tape, layer["ln_2"], hidden)
    fed = step.drop(_mlp(step, layer, "mlp.c_fc", "mlp.c_proj", hidden), p)
    hidden = op.add(tape, residual, fed)
    del attended  # the frame of the layer holds it until now
    return hidden


def _mlp(step: StepPass, layer: Layer, first: str, second: str, hidden: Tensor) -> Tensor:
    """Two linear layers; what the first one is given is held by the caller."""
    inner = step.linear(layer[first], hidden)
    acted = new_gelu if step.asked.family.activation == "new_gelu" else op.elementwise
    inner = acted(step.tape, inner)
    return step.linear(layer[second], inner)


def _joined_attention(step: StepPass, layer: Layer, hidden: Tensor, shared: Shared, p: float) -> Tensor:
    tape, shape = step.tape, shape_of(step, layer.attentions[0])
    eager = step.asked.attention == "eager"
    joined = step.linear(layer["attn.c_attn"], hidden)
    of_keys = shape.samples * (shape.key_heads * shape.keys * shape.head)
    q, k, v = op.split(tape, joined, (shape.of_queries(), of_keys, of_keys))
    del joined
    q, k, v = (heads(tape, x, shape.heads, clones=eager) for x in (q, k, v))
    out = attend(step, q, k, v, shared.mask, shape, dropout=GPT2_DROPOUT)
    out = step.linear(layer["attn.c_proj"], out)
    dropped = step.drop(out, p)
    del out  # before queries, keys and values, which the frame holds to its end
    return dropped


def starcoder2_layer(step: StepPass, layer: Layer, hidden: Tensor, shared: Shared) -> Tensor:
    """`Starcoder2DecoderLayer`."""
    tape, p = step.tape, 0.1 if layer.dropout else 0.0
    residual = hidden
    hidden = modules.layer_norm(tape, layer["input_layernorm"], hidden)
    hidden = _split_attention(step, layer, hidden, shared, p)
    hidden = op.add(tape, residual, hidden)
    residual = hidden
    hidden = modules.layer_norm(tape, layer["post_attention_layernorm"], hidden)
    hidden = step.drop(_mlp(step, layer, "mlp.c_fc", "mlp.c_proj", hidden), p)
    return op.add(tape, residual, hidden)


def phi_layer(step: StepPass, layer: Layer, hidden: Tensor, shared: Shared) -> Tensor:
    """`PhiDecoderLayer`: attention and MLP side by side."""
    tape, p = step.tape, 0.1 if layer.dropout else 0.0
    residual = hidden
    hidden = modules.layer_norm(tape, layer["input_layernorm"], hidden)
    attended = step.drop(_split_attention(step, layer, hidden, shared, 0.0), p)
    fed = step.drop(_mlp(step, layer, "mlp.fc1", "mlp.fc2", hidden), p)
    return op.add(tape, op.add(tape, attended, fed), residual)


def _split_attention(step: StepPass, layer: Layer, hidden: Tensor, shared: Shared, p: float) -> Tensor:
    """With a dropout of `p` at its end."""
    tape, described = step.tape, layer.attentions[0]
    shape = shape_of(step, described)
    mask = shared.mask if described.window is None else shared.window_mask
    repeats = step.repeats(mask, shape) or step.asked.attention == "eager"
    out = "dense" if "self_attn.dense" in layer else "o_proj"
    q = heads(tape, step.linear(layer["self_attn.q_proj"], hidden), shape.heads, clones=True)
    k = heads(tape, step.linear(layer["self_attn.k_proj"], hidden), shape.key_heads, clones=True)
    v = heads(tape, step.linear(layer["self_attn.v_proj"], hidden), shape.key_heads, clones=repeats)
    assert shared.rope is not None
    if step.asked.family.rotation == "halves":
        both = rotated(tape, q, shared.rope), rotated(tape, k, shared.rope)
    else:
        turned, rest = turned_apart(tape, q, k, shared.rope, described.rotary)  # this frame holds them until it returns
        both = joined_again(tape, turned[0], rest[0]), joined_again(tape, turned[1], rest[1])
    q, k = both
    del both
    attended = attend(step, q, k, v, mask, shape)
    attended = step.linear(layer[f"self_attn.{out}"], attended)
    return step.drop(attended, p)


def neox_layer(step: StepPass, layer: Layer, hidden: Tensor, shared: Shared) -> Tensor:
    """`GPTNeoXLayer`."""
    tape, p = step.tape, 0.1 if layer.dropout else 0.0
    attended = step.drop(_neox_attention(step, layer, hidden, shared), p)
    # The anatomy puts the second norm first where attention and MLP stand side by side.
    parallel = list(layer.modules).index("post_attention_layernorm") == 1
    if not parallel:
        attended = op.add(tape, attended, hidden)
    fed = step.drop(_normed_and_fed(step, layer, hidden if parallel else attended), p)
    return op.add(tape, op.add(tape, fed, attended), hidden) if parallel else op.add(tape, fed, attended)


def _normed_and_fed(step: StepPass, layer: Layer, hidden: Tensor) -> Tensor:
    """`self.mlp(self.post_attention_layernorm(hidden_states))`: only the call holds what is normed."""
    normed = modules.layer_norm(step.tape, layer["post_attention_layernorm"], hidden)
    return _mlp(step, layer, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", normed)


def _neox_attention(step: StepPass, layer: Layer, hidden: Tensor, shared: Shared) -> Tensor:
    tape, shape = step.tape, shape_of(step, layer.attentions[0])
    hidden = modules.layer_norm(tape, layer["input_layernorm"], hidden)
    joined = heads(tape, step.linear(layer["attention.query_key_value"], hidden), shape.heads, clones=True)
    q, k, v = op.split(tape, joined, (shape.of_queries(),) * 3)
    assert shared.rope is not None
    turned, rest = turned_apart(tape, q, k, shared.rope, layer.attentions[0].rotary)
    q = joined_again(tape, turned.pop(0), rest[0])
    k = joined_again(tape, turned.pop(0), rest[1])
    del rest
    out = attend(step, q, k, v, shared.mask, shape)
    out = step.linear(layer["attention.dense"], out)
    del q, k, v, joined, hidden  # `Module.__call__` holds what it was given to its end
    return out


def opt_layer(step: StepPass, layer: Layer, hidden: Tensor, shared: Shared) -> Tensor:
    """`OPTDecoderLayer`; OPT-350m normalises after attention and MLP instead of before."""
    tape, p = step.tape, GPT2_DROPOUT if layer.dropout else 0.0
    before = next(iter(layer.modules)) == "self_attn_layer_norm"
    residual = hidden
    if before:
        hidden = modules.layer_norm(tape, layer["self_attn_layer_norm"], hidden)
    hidden = _opt_attention(step, layer, hidden, shared)
    hidden = step.drop(hidden, p)
    hidden = op.add(tape, residual, hidden)
    if not before:
        hidden = modules.layer_norm(tape, layer["self_attn_layer_norm"], hidden)
    residual = hidden = op.reshaped(tape, hidden)
    if before:
        hidden = modules.layer_norm(tape, layer["final_layer_norm"], hidden)
    hidden = step.linear(layer["fc1"], hidden)
    hidden = op.elementwise(tape, hidden, keep_output=True)
    hidden = step.linear(layer["fc2"], hidden)
    hidden = step.drop(hidden, p)
    hidden = op.reshaped(tape, op.add(tape, residual, hidden))
    return hidden if before else modules.layer_norm(tape, layer["final_layer_norm"], hidden)


def _opt_attention(step: StepPass, layer: Layer, hidden: Tensor, shared: Shared) -> Tensor:
    tape, shape = step.tape, shape_of(step, layer.attentions[0])
    eager = step.asked.attention == "eager"
    q = op.scale(tape, step.linear(layer["self_attn.q_proj"], hidden))
    k, v = step.linear(layer["self_attn.k_proj"], hidden), step.linear(layer["self_attn.v_proj"], hidden)
    q, k, v = (heads(tape, x, shape.heads, clones=eager) for x in (q, k, v))
    return step.linear(layer["self_attn.out_proj"], attend(step, q, k, v, shared.mask, shape))


def new_gelu(tape: Tape, x: Tensor) -> Tensor:
    """`NewGELUActivation`, written out in Python: eight operators."""
    half = op.scale(tape, x)
    factor = op.shift(tape, op.elementwise(tape, _bent(tape, x), keep_output=True))
    out = op.mul(tape, half, factor)
    del half, factor
    return out


def _bent(tape: Tape, x: Tensor) -> Tensor:
    return op.scale(tape, op.add(tape, x, op.scale(tape, op.power(tape, x))))
