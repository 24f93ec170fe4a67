"""What operators give for fake tensors, remembered by the shapes, strides and types that go in.

A model repeats its layers, so nearly every call has been seen before. torch keeps such a cache itself
(torch/_subclasses/fake_tensor.py, `_cached_dispatch_impl`), but its key and its new tensors, which provide for symbolic
shapes, take two thirds of the time of a traced step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

aten = torch.ops.aten

_PLAIN = frozenset({int, float, bool, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format})
_DEPENDS_ON_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_ALWAYS = frozenset({"_fake_device", "fake_device", "fake_mode"})
"""Attributes of a fake tensor that are never None (torch 2.13 and before keep the device under two names)."""


class _Made(NamedTuple):
    """One output: an argument itself, a view of the storage of one, or (no `argument`) a tensor of its own."""

    argument: int | None
    is_itself: bool = False
    shape: Sequence[int] = ()
    strides: Sequence[int] = ()
    offset: int = 0
    dtype: torch.dtype | None = None
    attributes: dict[str, Any] = {}  # noqa: RUF012
    device: torch.device | None = None


class _Outputs(NamedTuple):
    """All outputs of an operator; `kind` is the type of the sequence they come in, None for a single one or none."""

    kind: type | None
    made: tuple[_Made, ...]


class Memo:
    """What the operators of one run gave."""

    def __init__(self) -> None:
        self._seen: dict[Any, dict[Any, _Outputs | None] | None] = {}
        """By operator; None for one whose outputs do not follow from metadata."""

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return what the operator gives, and run it only if that is not known."""
        if func not in self._seen:
            self._seen[func] = {} if _follows_from_metadata(func) else None
        seen = self._seen[func]
        tensors: list[FakeTensor] = []
        described: list[Any] = [torch.get_default_dtype(), torch.is_inference_mode_enabled(), *kwargs]
        if seen is None or not (_describe(args, described, tensors) and _describe(kwargs.values(), described, tensors)):
            return func(*args, **kwargs)
        key = tuple(described)
        if key not in seen:
            result = func(*args, **kwargs)
            seen[key] = _learn(result, tensors)
            return result
        outputs = seen[key]
        if outputs is None:
            return func(*args, **kwargs)
        if outputs.kind is None:
            return _make(outputs.made[0], tensors) if outputs.made else None
        return outputs.kind([_make(made, tensors) for made in outputs.made])


def _follows_from_metadata(func: Any) -> bool:
    """Operators of torch whose outputs follow from the metadata of their inputs, which they leave as it is."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    if torch.Tag.inplace_view in func.tags or "lift" in func._schema.name:
        return False
    # Masks never come here: the tracker's answers replace them by indices.
    return func is aten.index.Tensor or not any(tag in func.tags for tag in _DEPENDS_ON_DATA)


def _describe(values: Iterable[Any], key: list[Any], tensors: list[FakeTensor]) -> bool:
    """Append what decides about the outputs to `key` and the tensors to `tensors`; False if there is anything else."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None:
                return False
            key += (
                value.shape,
                value.stride(),
                value.storage_offset(),
                value.dtype,
                value.fake_device,
                torch._C._dispatch_keys(value).raw_repr(),
            )
            tensors.append(value)
        elif kind is list or kind is tuple or kind is torch.Size:
            key += (list, len(value))
            if not _describe(value, key, tensors):
                return False
        elif value is None:
            key.append(None)
        elif kind in _PLAIN:
            key += (kind, value)
        else:
            return False
    return True


def _learn(result: Any, tensors: Sequence[FakeTensor]) -> _Outputs | None:
    """Return how to make these outputs from these inputs again; None if they are not simply views or new tensors."""
    if result is None:
        return _Outputs(None, ())
    kind = type(result) if isinstance(result, tuple | list) else None
    made = []
    own_storages = set()
    for output in result if kind is not None else (result,):
        found = _learn_one(output, tensors)
        if found is None:
            return None
        if found.argument is None:
            own_storages.add(output.untyped_storage()._cdata)
        made.append(found)
    if len(own_storages) != sum(one.argument is None for one in made):
        return None
    return _Outputs(kind, tuple(made))


def _learn_one(output: Any, tensors: Sequence[FakeTensor]) -> _Made | None:
    if type(output) is not FakeTensor:
        return None
    for index, tensor in enumerate(tensors):
        if output is tensor:
            return _Made(index, is_itself=True)
    attributes = dict(vars(output))
    if any(
        value is not None and name not in ("_fake_device", "fake_device", "fake_mode")
        for name, value in attributes.items()
    ):
        return None
    storage = output.untyped_storage()
    owner = next((i for i, t in enumerate(tensors) if t.untyped_storage()._cdata == storage._cdata), None)
    made = _Made(
        owner,
        shape=tuple(output.shape),
        strides=output.stride(),
        offset=output.storage_offset(),
        dtype=output.dtype,
        attributes=attributes,
        device=output.fake_device,
    )
    again = _make(made, tensors)
    same = (
        again.untyped_storage().nbytes() == storage.nbytes()
        and again.storage_offset() == made.offset
        and torch._C._dispatch_keys(again) == torch._C._dispatch_keys(output)
    )
    return made if same else None


def _make(made: _Made, tensors: Sequence[FakeTensor]) -> FakeTensor:
    if made.is_itself:
        assert made.argument is not None
        return tensors[made.argument]
    assert made.device is not None
    with torch._C._DisableTorchDispatch():
        inner = torch.empty_strided(made.shape, made.strides, dtype=made.dtype, device="meta")
        if made.argument is not None:
            inner.set_(tensors[made.argument].untyped_storage(), made.offset, made.shape, made.strides)
    # C++ asks a fake tensor on the CPU for its device; one on CUDA is to answer meta (fake_cuda.py), as `inner` does.
    asked = made.device.type != "cuda"
    fake: FakeTensor = torch.Tensor._make_subclass(
        FakeTensor, inner, False, dispatch_device=asked, device_for_backend_keys=made.device
    )
    torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    fake.__dict__.update(made.attributes)
    return fake
