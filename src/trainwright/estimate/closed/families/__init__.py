"""The forward passes of transformers 5.23, module by module, on tensors without values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from trainwright.errors import UserError
from trainwright.estimate.closed.families import decoders, encoders, t5
from trainwright.estimate.closed.families.layer_stack import Model
from trainwright.estimate.closed.step import StepPass
from trainwright.estimate.closed.tape import Tensor

_OTHERS: Mapping[str, Callable[[StepPass, Model], Tensor]] = {
    "t5": t5.loss,
    "bert": encoders.bert_loss,
    "vit": encoders.vit_loss,
}


def forward_of(family: str) -> Callable[[StepPass, Model], Tensor]:
    """The pass from inputs to the loss.

    Raises:
        UserError: the family has none.
    """
    if family in _OTHERS:
        return _OTHERS[family]
    if family not in decoders.WAYS:
        raise UserError(f"memory of `{family}` models has no closed form", hints=["the traced step runs any model"])
    return partial(decoders.causal_loss, decoders.WAYS[family])
