"""A causal language model around its layers: embedding, masks, rotary tables, final norm, logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainwright.anatomy.family import Embedding, Family, LayerKind, Positions
from trainwright.estimate.closed import modules
from trainwright.estimate.closed import operators as op
from trainwright.estimate.closed.families import alibi, gpt, llama
from trainwright.estimate.closed.families.layer_stack import (
    Model,
    OneLayer,
    as_logits,
    begin,
    boundary,
    demanded,
    end,
    make_masks,
    rotary,
    through,
)
from trainwright.estimate.closed.loss import LOGITS, transformers_loss, workers_loss
from trainwright.estimate.closed.step import SAMPLES, SORTED_ABOVE, StepPass
from trainwright.estimate.closed.tape import FP32, Tensor

Embed = Callable[[StepPass, Model], list[Tensor]]
"""What is made before the masks, all of which the model's frame holds to its end."""
Enter = Callable[[StepPass, Model, list[Tensor]], Tensor]
"""What the first layer gets, made of it after the masks."""


@dataclass(frozen=True, slots=True)
class DecoderOutline:
    """How a family's decoder is put together around its layers."""

    layer: OneLayer
    norm: modules.Norm
    embed: Embed
    enter: Enter


def outline_of(family: Family) -> DecoderOutline:
    """What the record of a decoder says, as functions."""
    embed, enter = _ENTRANCES[family.positions]
    return DecoderOutline(
        LAYERS[family.layer],
        modules.NORMS[family.norm],
        embed or _EMBEDDINGS[family.embedding],
        enter,
    )


def causal_loss(way: DecoderOutline, step: StepPass, model: Model) -> Tensor:
    """The loss of a decoder."""
    rows = SAMPLES * step.asked.length
    logits = causal_logits(way, step, model)
    if step.asked.recipe == "transformers":
        return transformers_loss(step, logits, rows, upcast=True)
    vocabulary = round(logits.elements.imag / rows.imag)
    return workers_loss(step, logits, rows, vocabulary, shifted=True)


def causal_logits(way: DecoderOutline, step: StepPass, model: Model) -> Tensor:
    """`LlamaForCausalLM.forward` and its like."""
    tape, asked = step.tape, step.asked
    begin(step, model)
    embedded = way.embed(step, model)
    shared = make_masks(step, model, next(iter(model.outside[0].modules.values())).weight.dtype)
    turned = max((stage.layer.attentions[0] for stage in model.stages), key=lambda attention: attention.rotary)
    if turned.rotary:
        dtype = FP32 if asked.family.rotation.endswith("in_fp32") else embedded[-1].dtype
        shared.rope = rotary(step, round(turned.head_dim * turned.rotary), dtype)
        kinds = {stage.layer.attentions[0].window for stage in model.stages}
        if asked.family.tables_of_each_layer_type and len(kinds) > 1:
            shared.window_rope = rotary(step, round(turned.head_dim * turned.rotary), dtype)
    first = [boundary(step, way.enter(step, model, embedded), "embedding backward")]
    hidden = through(step, model.stages, way.layer, first.pop(), shared)
    tape.mark("head")
    *norms, head_module = model.outside[-1].modules.values()
    for norm in norms:
        hidden = way.norm(tape, norm, hidden) if norm.rows == 1 else step.linear(norm, hidden)
    while embedded:
        del embedded[0]
    del shared
    logits = as_logits(step, step.linear(head_module, hidden))
    if asked.family.scaled_logits:
        logits = op.scale(tape, logits, part=LOGITS)
    if asked.family.softcapped:
        logits = op.scale(tape, logits, part=LOGITS)
        logits = op.elementwise(tape, logits, keep_output=True, part=LOGITS)
        logits = op.scale(tape, logits, part=LOGITS)
    del hidden  # the model's frame ends before FSDP2 looks at its result
    return end(step, model, logits)


def words(step: StepPass, model: Model) -> list[Tensor]:
    """Word embeddings, on which transformers demands a gradient with checkpointing, whatever is trained."""
    return [demanded(step, _table(step, model))]


def scaled_words(step: StepPass, model: Model) -> list[Tensor]:
    """Gemma's, which are scaled."""
    return [demanded(step, op.scale(step.tape, _table(step, model)))]


def words_scaled_behind(step: StepPass, model: Model) -> list[Tensor]:
    """Granite's: the gradient is demanded on what is not scaled yet."""
    return [op.scale(step.tape, demanded(step, _table(step, model)))]


def words_and_places(step: StepPass, model: Model) -> list[Tensor]:
    """GPT-2's: positions are embedded once for all samples."""
    embedded = [*words(step, model), _places(step, model)]
    return [*embedded, op.add(step.tape, *embedded)]


def _places(step: StepPass, model: Model) -> Tensor:
    length = step.asked.length
    table = list(model.outside[0].modules.values())[1]
    return modules.embedding(step.tape, table, complex(length), sorted_above=length > SORTED_ABOVE)


def normed_words(step: StepPass, model: Model) -> list[Tensor]:
    """BLOOM's, which are normalised."""
    norm = list(model.outside[0].modules.values())[1]
    embedded = words(step, model)
    return [*embedded, modules.layer_norm(step.tape, norm, embedded[0])]


def as_embedded(step: StepPass, model: Model, embedded: list[Tensor]) -> Tensor:
    """The last of it, which the frame calls hidden states when it calls it anything."""
    return embedded[-1] if len(embedded) == 1 else embedded.pop()


def dropped(step: StepPass, model: Model, embedded: list[Tensor]) -> Tensor:
    """GPT-2's sum passes a dropout."""
    return step.drop(embedded.pop(), gpt.GPT2_DROPOUT)


def placed_and_dropped(step: StepPass, model: Model, embedded: list[Tensor]) -> Tensor:
    """GPT-BigCode embeds positions after the masks."""
    embedded.append(_places(step, model))
    return step.drop(op.add(step.tape, *embedded), gpt.GPT2_DROPOUT)


def opt_sum(step: StepPass, model: Model, embedded: list[Tensor]) -> Tensor:
    """OPT embeds positions for each sample, after the masks; OPT-350m widens the words first."""
    tape, asked = step.tape, step.asked
    table = dict(model.outside[0].modules)
    places = table["model.decoder.embed_positions"]
    embedded.append(modules.embedding(tape, places, SAMPLES * asked.length, sorted_above=asked.long))
    if "model.decoder.project_in" in table:
        embedded[0] = step.linear(table["model.decoder.project_in"], embedded[0])
    return op.add(tape, *embedded)


def _table(step: StepPass, model: Model) -> Tensor:
    asked = step.asked
    table = next(iter(model.outside[0].modules.values()))
    return modules.embedding(step.tape, table, SAMPLES * asked.length, sorted_above=asked.long)


LAYERS: Mapping[LayerKind, OneLayer] = {
    "LlamaDecoderLayer": llama.layer,
    "GPT2Block": gpt.gpt2_layer,
    "Starcoder2DecoderLayer": gpt.starcoder2_layer,
    "PhiDecoderLayer": gpt.phi_layer,
    "GPTNeoXLayer": gpt.neox_layer,
    "OPTDecoderLayer": gpt.opt_layer,
    "BloomBlock": alibi.bloom_layer,
    "MptBlock": alibi.mpt_layer,
}
_EMBEDDINGS: Mapping[Embedding, Embed] = {
    "plain": words,
    "scaled": scaled_words,
    "scaled_behind": words_scaled_behind,
    "normed": normed_words,
}
_ENTRANCES: Mapping[Positions, tuple[Embed | None, Enter]] = {
    "rotary": (None, as_embedded),
    "slopes": (None, as_embedded),
    "table": (words_and_places, dropped),
    "table_behind_masks": (words, placed_and_dropped),
    "table_for_each_sample": (words, opt_sum),
}
"""By how positions are known; None: by what is done to the words."""
