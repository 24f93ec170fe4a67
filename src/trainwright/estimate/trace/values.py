"""Values that are there while a script is traced: tensors on the CPU are real, but for those made to hold weights.

A script reads its data, draws its order and counts its tokens as ever. What it hands to the GPU holds nothing there,
but integers and masks are computed on the CPU beside it as long as they follow from data, so that what depends on
padding or on ignored labels is answered as in a real run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_map

from trainwright.estimate.trace.answers import Answers
from trainwright.estimate.trace.tracker import Tracker

aten = torch.ops.aten

FOLLOWED = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
MOST_ELEMENTS = 1 << 22
"""Larger masks, of all queries by all keys, are not followed."""
_WITHOUT_VALUES = ("aten::empty", "aten::new_empty", "aten::set_", "aten::resize")
_UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default


class KnownAnswers(Answers):
    """Answers from values where they are known; else no mask is full, and a number is 1."""

    def __init__(self) -> None:
        super().__init__(mask_is_full=False, learned_share=1.0)

    def item(self, tensor: torch.Tensor) -> bool | int | float:
        """Answer `.item()` and `bool()`."""
        known = value_of(tensor)
        if known is None:
            return super().item(tensor)
        with torch._C._DisableTorchDispatch():
            number: bool | int | float = known.item()
        return number

    def selected(self, mask: torch.Tensor) -> int:
        """Return how many elements of a mask are true."""
        known = value_of(mask)
        if known is None:
            return super().selected(mask)
        with torch._C._DisableTorchDispatch():
            return int(known.count_nonzero())


class AskedDevices(TorchFunctionMode):
    """Hears which device the script itself asks for.

    A bare number is a GPU, as torch takes it where it finds one: `torch.empty(8, device=0)`. And `meta` is meta only
    if Python asks for it; C++ repeats it after a fake CUDA tensor that said so (fake_cuda.py).
    """

    meta = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = kwargs.get("device") if kwargs else None
        if type(asked) is int:
            kwargs = kwargs | {"device": torch.device("cuda", asked)}
        before = AskedDevices.meta
        AskedDevices.meta = before or (asked is not None and torch.device(asked).type == "meta")
        try:
            return func(*args, **(kwargs or {}))
        finally:
            AskedDevices.meta = before


class ScriptTracker(Tracker):
    """A tracker that leaves real what is on the CPU, and follows integers on the fake GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if not types and stays_real(func, args, kwargs):
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if not types and isinstance(out, FakeTensor) and _has_tensor(args):
            self.label([out], "inputs")
        _follow(func, args, kwargs, out)
        return out

    def adopt(self, model: nn.Module) -> None:
        """Count what a model holds on the GPU even if a thread of its own has put it there; learn its vocabulary."""
        self._add_all((*model.parameters(), *model.buffers()), "loaded")
        inner = getattr(model, "module", model)
        self._vocabulary = getattr(getattr(inner, "config", None), "vocab_size", None)
        if isinstance(model, DistributedDataParallel):
            for key, _, _ in self._live.values():
                self.parts.setdefault(key, "communication")  # the buckets

    def held_by(self, *parts: str) -> int:
        """Return how much is held now by these parts."""
        return sum(size for key, size, _ in self._live.values() if self.parts.get(key) in parts)


def stays_real(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operator without fake inputs makes a real tensor: of data, or of integers, or one on `meta`."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return AskedDevices.meta and torch.device(device).type == "meta"
    if _has_tensor(args) or _has_tensor(kwargs):
        return True
    argument = next((argument for argument in func._schema.arguments if argument.name == "dtype"), None)
    if argument is None:
        return True
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return not dtype.is_floating_point
    takes_size = any(argument.name == "size" for argument in func._schema.arguments)
    return argument.default_value is not None or not takes_size  # `randint`, `randperm`, `arange`


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a tensor, None if they are not known."""
    if isinstance(tensor, FakeTensor):
        known: torch.Tensor | None = getattr(tensor, "known_value", None)
        return known
    return tensor if tensor.device.type == "cpu" else None


def install() -> None:
    """Let values go along when a tensor is moved, and be there as numpy arrays: ones, where they are not known."""

    def with_value(move: Any) -> Any:
        def moved(self: FakeTensor, *args: Any, **kwargs: Any) -> Any:
            target = args[0] if args else kwargs.get("device")
            if isinstance(target, str | torch.device) and torch.device(target).type == "meta":
                with torch._C._DisableTorchDispatch():
                    return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=self.requires_grad)
            result = move(self, *args, **kwargs)
            known = value_of(self)
            if known is not None and result is not self and isinstance(result, FakeTensor):
                with torch._C._DisableTorchDispatch():
                    result.known_value = known.to(result.dtype)
            return result

        return moved

    def numpy(self: FakeTensor, *, force: bool = False) -> Any:
        known = value_of(self)
        with torch._C._DisableTorchDispatch():
            return (torch.ones(self.shape, dtype=self.dtype) if known is None else known).numpy()

    FakeTensor.to, FakeTensor.cpu, FakeTensor.cuda = (
        with_value(m) for m in (FakeTensor.to, FakeTensor.cpu, FakeTensor.cuda)
    )
    FakeTensor.numpy = numpy


def _follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    if func is _UNSCALE:
        with torch._C._DisableTorchDispatch():
            args[1].known_value = torch.zeros(args[1].shape)  # no gradient overflows, or no step would be made
        return
    outputs = out if isinstance(out, tuple | list) else (out,)
    if not any(_can_be_followed(output) for output in outputs):
        return
    result = _of_finite(func, args)
    empty = func._schema.name.startswith(_WITHOUT_VALUES)
    if result is None and not empty and not tree_any(_is_unknown, (args, kwargs)):
        with torch._C._DisableTorchDispatch():
            known_args, known_kwargs = tree_map(_on_cpu, (args, kwargs))
            result = func(*known_args, **known_kwargs)
    results = result if isinstance(result, tuple | list) else (result,) * len(outputs)
    for output, known in zip(outputs, results, strict=True):
        if _can_be_followed(output):
            output.known_value = known


def _of_finite(func: Any, args: Sequence[Any]) -> torch.Tensor | None:
    """Numbers that a step computes are finite: `isnan`, `isinf`, and `isfinite`, which is `x == x` and `|x| != inf`."""
    name = func._schema.name
    if not args or not isinstance(args[0], FakeTensor) or not args[0].is_floating_point():
        return None
    same = len(args) > 1 and args[1] is args[0]
    infinite = len(args) > 1 and isinstance(args[1], float) and math.isinf(args[1])
    answer = {
        "aten::isnan": False,
        "aten::isinf": False,
        "aten::eq": True if same else False if infinite else None,
        "aten::ne": False if same else True if infinite else None,
    }.get(name)
    if answer is None:
        return None
    with torch._C._DisableTorchDispatch():
        return torch.full(args[0].shape, answer)


def _can_be_followed(output: Any) -> bool:
    return isinstance(output, FakeTensor) and output.dtype in FOLLOWED and output.numel() <= MOST_ELEMENTS


def _is_unknown(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value_of(value) is None


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value_of(value)
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _has_tensor(values: Any) -> bool:
    return bool(tree_any(lambda value: isinstance(value, torch.Tensor), values))
