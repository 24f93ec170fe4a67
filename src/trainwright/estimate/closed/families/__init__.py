"""The forward passes of transformers, module by module, on tensors without values; a family's record chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from trainwright.anatomy.family import Family, LayerKind
from trainwright.estimate.closed.families import decoders, encoders, t5
from trainwright.estimate.closed.families.layer_stack import Model
from trainwright.estimate.closed.step import StepPass
from trainwright.estimate.closed.tape import Tensor

_NO_DECODERS: Mapping[LayerKind, Callable[[StepPass, Model], Tensor]] = {
    "T5Block": t5.loss,
    "BertLayer": encoders.bert_loss,
    "ViTLayer": encoders.vit_loss,
}


def forward_of(family: Family) -> Callable[[StepPass, Model], Tensor]:
    """The pass from inputs to the loss."""
    return _NO_DECODERS.get(family.layer) or partial(decoders.causal_loss, decoders.outline_of(family))
