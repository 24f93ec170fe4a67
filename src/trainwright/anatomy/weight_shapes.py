"""Shapes of a model's parameters, from its description or from the headers of its safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from trainwright.anatomy.parts import Anatomy
from trainwright.anatomy.quantized import quantized_matrices

Shape = tuple[int, ...]

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
LARGEST_HEADER_BYTES = 100_000_000
"""safetensors refuses larger ones (safetensors/src/tensor.rs, MAX_HEADER_SIZE)."""
_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
_NEVER_PACKED = ("embed", "lm_head", "wte", "wpe", ".experts.")
"""Parts of names: embeddings, the output embedding, and experts, which transformers stacks in one tensor."""


@dataclass(frozen=True)
class ModelShapes:
    """Parameters by name, shared ones once, and where they were read.

    `linear` are the matrices that 4-bit loading packs and adapters go to; None where only the number of parameters is
    known.
    """

    parameters: Mapping[str, Shape]
    linear: frozenset[str] | None
    source: str

    @property
    def count(self) -> int:
        """Number of parameters."""
        return sum(map(prod, self.parameters.values()))


def shapes_of_anatomy(anatomy: Anatomy) -> ModelShapes:
    """Return the shapes of a model that is described here."""
    linear = frozenset(f"{path}.weight" for path in quantized_matrices(anatomy))
    return ModelShapes(anatomy.parameters(), linear, "its dimensions")


def shapes_in_files(folder: Path, config: Mapping[str, Any]) -> ModelShapes | None:
    """Return the shapes in a folder's safetensors files, or the number of parameters in their index; None: neither.

    Only headers are read. Files of quantized weights do not say what the model is made of.
    """
    if config.get("quantization_config") is not None:
        return None
    index = _json(folder / INDEX)
    weight_map = index.get("weight_map")
    files = set(weight_map.values()) if isinstance(weight_map, dict) else {WHOLE}
    headers = [_header(folder / str(name)) for name in sorted(files, key=str)]
    if all(header is not None for header in headers):
        shapes = {name: shape for header in headers if header is not None for name, shape in header.items()}
        linear = {n for n, s in shapes.items() if len(s) == 2 and not any(part in n for part in _NEVER_PACKED)}
        return ModelShapes(shapes, frozenset(linear), f"the safetensors files in {folder}")
    count = _count(index.get("metadata"), config)
    return None if count is None else ModelShapes({"": (count,)}, None, f"{folder / INDEX}")


def _count(metadata: Any, config: Mapping[str, Any]) -> int | None:
    if not isinstance(metadata, dict):
        return None
    stated = metadata.get("total_parameters")
    if isinstance(stated, int) and stated > 0:
        return stated
    inner = config.get("text_config")
    stored = config.get("dtype") or config.get("torch_dtype")
    if stored is None and isinstance(inner, dict):
        stored = inner.get("dtype") or inner.get("torch_dtype")
    size, element = metadata.get("total_size"), _BYTES.get(str(stored).removeprefix("torch."))
    if not isinstance(size, int) or size <= 0 or element is None:
        return None
    return size // element


def _header(path: Path) -> dict[str, Shape] | None:
    """Return the tensors of one file, None where it is not there or not a safetensors file."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= LARGEST_HEADER_BYTES:
                return None
            content = json.loads(file.read(length))
        return {name: tuple(map(int, entry["shape"])) for name, entry in content.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
