"""BERT with its masked language model head, ViT with its classifier, and transformers' own losses on them."""

from __future__ import annotations

from trainwright.estimate.closed import modules
from trainwright.estimate.closed import operators as op
from trainwright.estimate.closed.attention import AttentionShape
from trainwright.estimate.closed.families.layer_stack import (
    Model,
    as_logits,
    begin,
    boundary,
    demanded,
    end,
    pair_mask,
    through,
)
from trainwright.estimate.closed.families.llama import attend, heads
from trainwright.estimate.closed.loss import transformers_loss
from trainwright.estimate.closed.modules import Module
from trainwright.estimate.closed.step import SAMPLES, SORTED_ABOVE, Layer, Shared, StepPass
from trainwright.estimate.closed.tape import HALF, Tensor

PIXEL = 4
DROPOUT = 0.1
"""`hidden_dropout_prob` and `attention_probs_dropout_prob` of BERT."""


def bert_loss(step: StepPass, model: Model) -> Tensor:
    """`BertForMaskedLM`."""
    tape, asked = step.tape, step.asked
    before, after = (list(layer.modules.values()) for layer in model.outside)
    begin(step, model)
    tokens = SAMPLES * asked.length
    words = demanded(step, modules.embedding(tape, before[0], tokens, sorted_above=asked.long))
    types = modules.embedding(tape, before[2], tokens, sorted_above=asked.long)
    places = modules.embedding(tape, before[1], complex(asked.length), sorted_above=asked.length > SORTED_ABOVE)
    embedded = op.add(tape, op.add(tape, words, types), places)
    del words, types, places
    embedded = step.drop(modules.layer_norm(tape, before[3], embedded), DROPOUT)
    embedded = boundary(step, embedded, "embedding backward")
    shared = Shared(mask=pair_mask(step, asked.length, asked.length) if asked.batch == "padded" else None)
    hidden = through(step, model.stages, bert_layer, embedded, shared)
    del embedded, shared
    tape.mark("head")
    transform, norm, bias, decoder = after
    inner = op.elementwise(tape, step.linear(transform, hidden))
    decoder.bias = bias.weight
    logits = as_logits(step, step.linear(decoder, modules.layer_norm(tape, norm, inner)))
    del inner, hidden
    logits = end(step, model, logits)
    return transformers_loss(step, logits, tokens, upcast=False)


def bert_layer(step: StepPass, layer: Layer, hidden: Tensor, shared: Shared) -> Tensor:
    """`BertLayer`: normalised after attention and MLP."""
    tape = step.tape
    attended = step.drop(_attention(step, layer, hidden, shared, "attention.self.", dropout=DROPOUT), DROPOUT)
    attended = modules.layer_norm(tape, layer["attention.output.LayerNorm"], op.add(tape, attended, hidden))
    inner = op.elementwise(tape, step.linear(layer["intermediate.dense"], attended))
    out = step.drop(step.linear(layer["output.dense"], inner), DROPOUT)
    del inner
    return modules.layer_norm(tape, layer["output.LayerNorm"], op.add(tape, out, attended))


def _attention(
    step: StepPass, layer: Layer, hidden: Tensor, shared: Shared, path: str, *, dropout: float = 0.0
) -> Tensor:
    tape, described = step.tape, layer.attentions[0]
    length = step.asked.length
    shape = AttentionShape(SAMPLES, described.heads, described.heads, described.head_dim, length, length)
    eager = step.asked.attention == "eager"
    bert = path == "attention.self."
    names = ("query", "key", "value") if bert else ("q_proj", "k_proj", "v_proj")
    q, k, v = (heads(tape, step.linear(layer[path + n], hidden), shape.heads, clones=eager) for n in names)
    out = attend(step, q, k, v, shared.mask, shape, dropout=dropout, causal=False)
    return step.linear(layer["attention.output.dense" if bert else "attention.o_proj"], out)


def vit_loss(step: StepPass, model: Model) -> Tensor:
    """`ViTForImageClassification`; its logits are too few to count."""
    tape, asked = step.tape, step.asked
    before, after = (list(layer.modules.values()) for layer in model.outside)
    begin(step, model)
    embedded = boundary(step, _patches(step, *before), "embedding backward")
    hidden = through(step, model.stages, vit_layer, embedded, Shared())
    del embedded
    tape.mark("head")
    hidden = modules.layer_norm(tape, after[0], hidden)
    first = op.part_of(tape, hidden, SAMPLES * after[0].columns)
    logits = step.linear(after[1], first) if len(after) > 1 else first
    return end(step, model, op.to(tape, logits, 4) if asked.autocast else logits)


def _patches(step: StepPass, token: Module, places: Module, projection: Module) -> Tensor:
    """A convolution over patches, the class token in front, positions added."""
    tape = step.tape
    patches = SAMPLES * (step.asked.length - 1)
    pixels = op.lower(tape, Tensor(None, patches * projection.columns, PIXEL if step.asked.autocast else HALF))
    bias = projection.bias.tensor if projection.bias is not None else None
    made = op.product(tape, pixels, projection.weight.tensor, projection.rows, projection.columns, bias)
    del pixels
    joined = op.concatenated(tape, [op.expanded(tape, token.weight.tensor, SAMPLES * projection.rows), made])
    del made
    return op.add(tape, joined, places.weight.tensor)


def vit_layer(step: StepPass, layer: Layer, hidden: Tensor, shared: Shared) -> Tensor:
    """`ViTLayer`."""
    tape, p = step.tape, DROPOUT if layer.dropout else 0.0
    residual = hidden
    hidden = modules.layer_norm(tape, layer["layernorm_before"], hidden)
    hidden = op.add(tape, step.drop(_attention(step, layer, hidden, shared, "attention."), p), residual)
    residual = hidden
    hidden = modules.layer_norm(tape, layer["layernorm_after"], hidden)
    hidden = op.elementwise(tape, step.linear(layer["mlp.fc1"], hidden))
    hidden = step.drop(step.linear(layer["mlp.fc2"], hidden), p)
    return op.add(tape, hidden, residual)
