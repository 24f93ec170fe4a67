"""Parameters of a model by part, and which of them are trained when some are frozen."""

from __future__ import annotations

import difflib
import fnmatch
from collections import Counter
from collections.abc import Sequence
from math import prod

from trainwright.anatomy.parts import Anatomy, ModuleWeight, Part, Segment, join
from trainwright.errors import UserError


def parameters_by_part(anatomy: Anatomy) -> dict[Part, int]:
    """Numbers of parameters; every bias but a norm's is counted under `bias`, shared tensors once."""
    counted: Counter[Part] = Counter()
    for _, weight in anatomy.weights():
        for name, shape in weight.parameters(""):
            is_bias = name.endswith(".bias") and weight.kind not in ("norm", "parameter")
            counted["bias" if is_bias else weight.part] += prod(shape)
    return dict(counted)


def segment_parameters(segment: Segment) -> int:
    """Number of parameters of one segment: a layer, or what stands around the layers."""
    owned = (weight for weight in segment.operations if isinstance(weight, ModuleWeight))
    return sum(prod(shape) for weight in owned for _, shape in weight.parameters(""))


def trainable_parameters(anatomy: Anatomy, freeze: Sequence[str] = ()) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that are left to train when `freeze` patterns (`shared.*`, `encoder.*`) are frozen.

    A pattern that matches one name of a shared tensor freezes the tensor.

    Raises:
        UserError: a pattern matches no parameter, or nothing is left to train.
    """
    owned = anatomy.parameters()
    owner_of = {name: name for name in owned} | _other_names(anatomy)
    frozen: set[str] = set()
    for pattern in freeze:
        matched = fnmatch.filter(owner_of, pattern)
        if not matched:
            near = difflib.get_close_matches(pattern, owner_of, n=3) or list(owner_of)[:3]
            raise UserError(
                f"method.freeze: `{pattern}` matches no parameter",
                hints=[f"parameters are named like {', '.join(near)}; `encoder.*` freezes all of a part"],
            )
        frozen.update(owner_of[name] for name in matched)
    left = {name: shape for name, shape in owned.items() if name not in frozen}
    if not left:
        raise UserError(
            "no parameter is left to train",
            hints=[f"method.freeze={list(freeze)} freezes every parameter; freeze fewer"],
        )
    return left


def _other_names(anatomy: Anatomy) -> dict[str, str]:
    """Further names under which transformers lists shared tensors, and the names that own them."""
    names = {f"{path}.weight": f"{weight.tied_to}.weight" for path, weight in anatomy.weights() if weight.tied_to}
    return names | dict(anatomy.family.further_names)


def path_of(segment: Segment, weight: ModuleWeight) -> str:
    """Full path of a module."""
    return join(segment.prefix, weight.name)
