"""Which model of GPU a cluster's type is: `a100` may be one of four, and the nodes' features often tell which."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from trainwright.errors import UserError
from trainwright.hardware import catalog
from trainwright.hardware.slurm.cluster import Cluster, SlurmNode

_MEMORY_FEATURE: Final = re.compile(
    r"(?:(?P<gpu>gpu|vram|gmem)[:_=-]?(?:mem)?[:_=-]?)?(?P<gib>\d{1,3})(?P<unit>gi?b?)?", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True)
class GpuModel:
    """The catalogue's key for a type, None where it is not known; `others` are the keys it may be as well.

    `reason` says what told it, and `features` which of the node's were needed to tell.
    """

    key: str | None
    reason: str
    others: tuple[str, ...] = ()
    features: tuple[str, ...] = ()

    @property
    def is_assumed(self) -> bool:
        """Whether it may be another model."""
        return bool(self.others)


def model_of(kind: str | None, features: Sequence[str], model_by_type: Mapping[str, str]) -> GpuModel:
    """Return the model of a type on a node with these features; `told` is what the user says of types.

    Where several are possible the one with the least memory is taken: what fits on it fits on all.
    """
    if kind is not None and kind in model_by_type:
        return GpuModel(key=model_by_type[kind], reason="as you say")
    of_type = catalog.variants_of(kind) if kind else ()
    possible, used = _narrowed_by_all(of_type, features)
    if not possible:
        return GpuModel(key=None, reason="not in the catalogue" if kind else "the cluster does not say which")
    chosen = min(possible, key=lambda gpu: gpu.total_bytes or 0)
    if not of_type:
        reason = "the node's features"
    else:
        reason = f"the type {kind}" + (f" and the feature {', '.join(used)}" if used else "")
    others = tuple(gpu.key for gpu in possible if gpu is not chosen)
    return GpuModel(key=chosen.key, reason=reason, others=others, features=tuple(used))


def told_types(pairs: Sequence[str], cluster: Cluster) -> dict[str, str]:
    """Return what the user says of types, as `a100=a100-80gb`.

    Raises:
        UserError: a type that the cluster does not have, or a model that is not in the catalogue; all at once.
    """
    model_by_type: dict[str, str] = {}
    problems: list[str] = []
    types = [kind for kind in cluster.gpu_types if kind is not None]
    for pair in pairs:
        kind, equals, model = pair.partition("=")
        if not equals or kind not in types:
            problems.append(
                f"`{pair}`: write TYPE=MODEL with one of the types {', '.join(types) or '(there are none)'}"
            )
            continue
        try:
            model_by_type[kind] = catalog.find(model).key
        except UserError as error:
            problems.append(f"`{pair}`: {error.message}; {'; '.join(error.hints)}")
    if problems:
        raise UserError("--gpu-type cannot be used", problems=problems)
    return model_by_type


def assumptions(cluster: Cluster, model_by_type: Mapping[str, str]) -> list[str]:
    """Return a sentence for every type that is assumed or unknown, with what to do about it."""
    sentences: dict[str, None] = {}
    for node in cluster.nodes:
        for gpus in node.gpus:
            model = model_of(gpus.type, node.features, model_by_type)
            named = gpus.type or f"GPUs of {node.name}"
            if model.key is None:
                what = f"say what it is: --gpu-type {gpus.type}=MODEL" if gpus.type else "no request for it is planned"
                sentences[f"{named}: {model.reason}; {what}"] = None
            elif model.is_assumed:
                how_to_tell = f"--gpu-type {gpus.type}={model.others[-1]}" if gpus.type else "ask the administrators"
                sentences[
                    f"{named} may be {', '.join((model.key, *model.others))}: {model.key} is assumed, the smallest; "
                    f"if it is another: {how_to_tell}"
                ] = None
    return list(sentences)


def key_of(node: SlurmNode, kind: str | None, model_by_type: Mapping[str, str]) -> str | None:
    """Return the catalogue's key of a type on a node."""
    return model_of(kind, node.features, model_by_type).key


def _narrowed_by_all(
    of_type: Sequence[catalog.GpuSpec], features: Sequence[str]
) -> tuple[Sequence[catalog.GpuSpec], list[str]]:
    """Return the models that are left after every feature, and the features that ruled some out."""
    possible, used = of_type, []
    for feature in features:
        narrower = _narrowed(possible, feature, re.split(r"[:=]", feature)[-1])
        if narrower and (not possible or len(narrower) < len(possible)):
            possible = narrower
            used.append(feature)
    return possible, used


def _narrowed(possible: Sequence[catalog.GpuSpec], feature: str, value: str) -> list[catalog.GpuSpec]:
    """What a feature leaves of the models found so far, or where none is, what it names itself."""
    named = catalog.variants_of(value)
    if not possible:
        return list(named)
    if kept := [gpu for gpu in possible if gpu in named]:
        return kept
    match = _MEMORY_FEATURE.fullmatch(feature) or (_MEMORY_FEATURE.fullmatch(value) if value != feature else None)
    if match is None or not (match["gpu"] or match["unit"]):
        return []
    return [gpu for gpu in possible if gpu.memory_gib is not None and int(gpu.memory_gib.value) == int(match["gib"])]
