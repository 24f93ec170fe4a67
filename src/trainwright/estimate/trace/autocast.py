"""Autocast for fake CUDA tensors.

The C++ test whether a tensor is to be cast asks `is_cuda()`, which a fake tensor denies (it says meta to C++). So the
kernels of the key AutocastCUDA are registered again in Python, from the same lists: include/ATen/autocast_mode.h.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
_cast_weights: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
_libraries: list[torch.library.Library] = []
observers: list[Callable[[torch.Tensor], None]] = []
"""Called with each cast of a weight that is kept."""
_RULES = {
    "AT_FORALL_LOWER_PRECISION_FP": "lower_precision",
    "AT_FORALL_FP32": "fp32",
    "AT_FORALL_FP32_SET_OPT_DTYPE": "fp32_set_opt_dtype",
    "AT_FORALL_PROMOTE": "promote",
}


def register() -> None:
    """Register a kernel for every operator of autocast's lists."""
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    for name, overload, rule in _operators():
        packet = getattr(torch.ops.aten, name, None)
        operator = getattr(packet, overload or "default", None)
        if operator is not None:
            kernel = {
                "lower_precision": _in_lower_precision,
                "fp32": _in_fp32,
                "fp32_set_opt_dtype": _with_fp32_output,
                "promote": _in_widest,
            }[rule](operator)
            library.impl(f"{name}.{overload}" if overload else name, kernel, "AutocastCUDA")
    clear = torch.clear_autocast_cache

    def clear_cache() -> None:
        _cast_weights.clear()
        clear()

    torch.clear_autocast_cache = clear_cache


def _operators() -> list[tuple[str, str, str]]:
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    found = []
    for macro, rule in _RULES.items():
        body = re.search(rf"#define {macro}\(_\)(.*?)\n\n", header, re.DOTALL)
        assert body is not None, f"no {macro} in ATen/autocast_mode.h of torch {torch.__version__}"
        found += [(name, overload, rule) for name, overload in re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body.group(1))]
    return found


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "cuda"
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast tensors, and those in lists; the cast of an fp32 weight is kept until autocast ends, as torch does."""
    if isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value):
        return type(value)(_cast(item, dtype) for item in value)
    if not _eligible(value) or value.dtype == dtype:
        return value
    is_weight = value.dtype == torch.float32 and value.requires_grad and value.is_leaf and not value._is_view()
    if not is_weight or dtype == torch.float32 or not torch.is_autocast_cache_enabled():
        return value.to(dtype)
    return _cast_weight(value, dtype)


def _cast_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cached = _cast_weights.get(id(weight))
    if cached is None or cached[0]() is not weight:
        cached = _cast_weights[id(weight)] = (weakref.ref(weight), weight.to(dtype))
        for observer in observers:
            observer(cached[1])
    return cached[1]


def _all_cast(args: tuple[Any, ...], dtype: torch.dtype) -> list[Any]:
    """Cast arguments, the last first: the order in which compilers of torch's Linux builds evaluate them."""
    return [_cast(argument, dtype) for argument in reversed(args)][::-1]


def _in_lower_precision(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("cuda")
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            kwargs = {k: _cast(a, dtype) for k, a in kwargs.items()}
            return operator(*_all_cast(args, dtype), **kwargs)

    return kernel


def _in_fp32(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        fp32 = torch.float32
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            kwargs = {k: _cast(a, fp32) for k, a in kwargs.items()}
            return operator(*_all_cast(args, fp32), **kwargs)

    return kernel


def _with_fp32_output(operator: Any) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]
    place = names.index("dtype") if "dtype" in names else None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if place is not None and args and _eligible(args[0]):
            if place < len(args) and args[place] is None:
                args = (*args[:place], torch.float32, *args[place + 1 :])
            elif place >= len(args) and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.float32
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            return operator(*args, **kwargs)

    return kernel


def _in_widest(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        any_fp32 = any(_eligible(a) and a.dtype == torch.float32 for a in args)
        dtype = torch.float32 if any_fp32 else torch.get_autocast_dtype("cuda")
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            return operator(*_all_cast(args, dtype), **kwargs)

    return kernel
