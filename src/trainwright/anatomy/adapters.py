"""LoRA: which modules get an adapter and how large it is, chosen as peft 0.21 chooses.

An adapter of rank r on a matrix of `rows` outputs and `columns` inputs is A (r x columns) and B (rows x r).
`all-linear` takes every `nn.Linear` and `Conv1D` but the output embedding. Mixtral and Qwen3-MoE, whose experts
transformers 5 stacked, are special: peft translates the old module names into the new tensors, `all-linear` includes
them, and gate and up, which are one tensor now, get twice the rank (`_convert_peft_config_moe` in
`peft/utils/transformers_weight_conversion.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from trainwright.anatomy.parts import Anatomy, ModuleWeight
from trainwright.errors import UserError

AllLinear = Literal["all-linear"]

_ADAPTABLE: Final = frozenset({"linear", "conv1d", "embedding", "patches"})


@dataclass(frozen=True)
class Lora:
    """What is asked for: the rank, and the modules by name."""

    r: int
    targets: AllLinear | Sequence[str] = "all-linear"


@dataclass(frozen=True, slots=True)
class Adapter:
    """One pair of matrices, `copies` times (once for each expert)."""

    rank: int
    rows: int
    columns: int
    copies: int = 1

    @property
    def parameter_count(self) -> int:
        """Parameters of A and B."""
        return self.copies * self.rank * (self.rows + self.columns)


def adapters(anatomy: Anatomy, lora: Lora) -> dict[str, Adapter]:
    """The adapter of each adapted module by its full path (for experts: the path of the stacked tensor).

    Raises:
        UserError: nothing matches, or a name stands for something that takes no adapter.
    """
    weights = dict(anatomy.weights())
    old_names = anatomy.family.old_expert_names
    chosen = _by_old_expert_names(anatomy, lora) if old_names else {}
    if lora.targets == "all-linear":
        for path, weight in weights.items():
            if weight.kind in ("linear", "conv1d") and path != anatomy.output and _leaf(path) not in old_names:
                chosen[path] = _adapter(weight, lora.r)
        return chosen
    wanted = [name for name in lora.targets if _leaf(name) not in old_names]
    chosen |= _by_name(anatomy, weights, wanted, lora.r)
    _require_no_group(anatomy, weights, wanted)
    if not chosen:
        raise UserError(f"method.targets: no module is named {' or '.join(lora.targets)}", hints=[_hint(anatomy)])
    return chosen


def adapter_parameters(anatomy: Anatomy, lora: Lora) -> int:
    """Number of trained parameters."""
    return sum(adapter.parameter_count for adapter in adapters(anatomy, lora).values())


def _by_name(
    anatomy: Anatomy, weights: Mapping[str, ModuleWeight], wanted: Sequence[str], rank: int
) -> dict[str, Adapter]:
    """Adapters of the modules that have one of the names."""
    chosen = {}
    for path, weight in weights.items():
        if weight.kind in ("experts", "parameter") or not _matches(path, wanted):
            continue
        if weight.kind not in _ADAPTABLE:
            raise UserError(f"method.targets: `{path}` is a {weight.kind} and takes no adapter", hints=[_hint(anatomy)])
        chosen[path] = _adapter(weight, rank)
    return chosen


def _require_no_group(anatomy: Anatomy, paths: Iterable[str], wanted: Sequence[str]) -> None:
    """Raise a UserError where a name stands for a module that holds others."""
    groups = {path.rsplit(".", depth)[0] for path in paths for depth in range(1, path.count(".") + 1)}
    if inner := sorted(path for path in groups if _matches(path, wanted)):
        raise UserError(f"method.targets: `{inner[0]}` is a group of modules, no matrix", hints=[_hint(anatomy)])


def _by_old_expert_names(anatomy: Anatomy, lora: Lora) -> dict[str, Adapter]:
    """Adapters of routers and stacked experts that old names ask for, on the tensors that they became."""
    translation = anatomy.family.old_expert_names
    named = translation if lora.targets == "all-linear" else map(_leaf, lora.targets)
    asked = set(translation) & set(named)
    fused = {old for old, new in translation.items() if new == "gate_up_proj"}
    if asked & fused and not fused <= asked:
        raise UserError(
            f"method.targets: {' and '.join(sorted(fused))} are one tensor, so that both need an adapter or none",
            hints=[f"name {' and '.join(sorted(fused))} together"],
        )
    rank_of = {translation[old]: lora.r * (2 if old in fused else 1) for old in asked}
    return {
        path: _adapter(weight, rank_of[_leaf(path)])
        for path, weight in anatomy.weights()
        if weight.kind in ("router", "experts") and _leaf(path) in rank_of
    }


def _adapter(weight: ModuleWeight, rank: int) -> Adapter:
    return Adapter(rank, weight.rows, weight.columns, weight.copies)


def _matches(path: str, names: Sequence[str]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def _leaf(path: str) -> str:
    return path.rsplit(".", 1)[-1]


def _hint(anatomy: Anatomy) -> str:
    names = {_leaf(path): None for path, weight in anatomy.weights() if weight.kind in ("linear", "conv1d")}
    return f"linear modules of this model: {', '.join(names)}; or method.targets=all-linear for all but the output"
