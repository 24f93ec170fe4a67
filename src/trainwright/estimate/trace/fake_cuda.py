"""CUDA tensors that hold nothing, on a machine without CUDA, good enough for an eager training step.

`FakeTensorMode` alone does not train on a machine without a GPU: device guards, the autograd engine and autocast
look for a device (torch 2.13 CPU build: "PyTorch is not linked with support for cuda devices"; CUDA build:
"hasPrimaryContext expects a valid device index"). So a fake tensor says `cuda` to Python and `meta` to C++: the
engine, its guards and its streams take the path of meta tensors, while the dispatch keys stay CUDA, so that the
kernels registered in autocast.py and kernels.py apply.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import fake_tensor as fake
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import Module, Parameter

from trainwright.estimate.trace import autocast, kernels

META, CUDA = torch.device("meta"), torch.device("cuda", 0)
DEVICE_QUERY = torch.ops.prim.device.default
_NO_KWARGS = fake.immutable_dict()

_installed = False


def install() -> None:
    """Replace, for this process, what stands between fake tensors and a training step; once is enough."""
    global _installed
    if _installed:
        return
    _installed = True
    _answer_meta_to_cpp()
    _make_factories_answer_cuda()
    _claim_cuda()
    _move_in_python()
    _copy_deeply_by_clone()
    _apply_to_modules_in_place()
    # torch.library warns of each kernel of its own that it replaces, which is the purpose here.
    warnings.filterwarnings("ignore", message="(?s).*[Oo]verriding a previously registered kernel.*")
    autocast.register()
    kernels.register()


def _answer_meta_to_cpp() -> None:
    """torch/_subclasses/fake_tensor.py: `prim.device` is how C++ asks a fake tensor for its device."""
    original = FakeTensor.__torch_dispatch__.__func__

    def answer(tensor: FakeTensor) -> torch.device:
        if tensor.fake_mode.in_kernel_invocation or tensor.fake_device.type == "cuda":
            return META
        return tensor.fake_device

    def dispatch(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = _NO_KWARGS) -> Any:
        if func is DEVICE_QUERY:
            return answer(args[0])
        return original(cls, func, types, args, kwargs)

    FakeTensor.__torch_dispatch__ = classmethod(dispatch)
    fake._DISPATCH_META_HANDLERS[DEVICE_QUERY] = lambda args: answer(args[0])


def _make_factories_answer_cuda() -> None:
    """torch/_subclasses/fake_tensor.py: C++ factories repeat `meta` after a tensor that said so; that means cuda.

    Torch 2.13 normalizes devices in a method of its own, 2.11 and 2.12 in `__new__`.
    """
    if hasattr(FakeTensor, "_normalize_fake_device"):
        normalize = FakeTensor._normalize_fake_device
        FakeTensor._normalize_fake_device = staticmethod(
            lambda device: CUDA if device.type in ("meta", "cuda") else normalize(device)
        )
        return
    original = FakeTensor.__new__

    def new(cls: type, fake_mode: Any, elem: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        device = torch.device(device)
        return original(cls, fake_mode, elem, CUDA if device.type == "meta" else device, *args, **kwargs)

    FakeTensor.__new__ = staticmethod(new)


def _claim_cuda() -> None:
    """What Python asks: tensors about themselves, torch.amp about its device, transformers about bf16."""
    # Without this, entering the mode initializes CUDA (torch/_subclasses/fake_tensor.py).
    FakeTensorMode.avoid_device_init = property(lambda self: True)
    FakeTensor.is_cuda = property(lambda self: self.fake_device.type == "cuda")
    FakeTensor.is_meta = property(lambda self: False)
    # torch/amp/autocast_mode.py disables itself with a warning if this is true.
    import torch.cuda.amp.common

    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    # C++ groups fake CUDA tensors under `meta`, for which gradient clipping refuses its multi-tensor kernels.
    from torch.utils import _foreach_utils

    supported = _foreach_utils._get_foreach_kernels_supported_devices
    _foreach_utils._get_foreach_kernels_supported_devices = lambda: [*supported(), "meta"]
    torch.cuda.get_device_capability = lambda device=None: kernels.DEVICE.compute_capability
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True


class _Move(torch.autograd.Function):
    """A copy to another device, with the copy back in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, device: torch.device, dtype: torch.dtype, memory_format: Any) -> torch.Tensor:
        ctx.device, ctx.dtype = tensor.fake_device, tensor.dtype
        return torch.empty_like(tensor, device=device, dtype=dtype, requires_grad=False, memory_format=memory_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return torch.empty_like(gradient, device=ctx.device, dtype=ctx.dtype), None, None, None


def _move_in_python() -> None:
    """`Tensor.to`, `.cuda`, `.cpu`: C++ takes the tensor for a meta one, which cannot be moved."""

    def to(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        positional = list(args)
        if positional and isinstance(positional[0], torch.Tensor):
            positional = [positional[0].device, positional[0].dtype, *positional[1:]]
        copy = kwargs.pop("copy", False)
        if len(positional) >= 3 and isinstance(positional[-1], bool) and isinstance(positional[-2], bool):
            copy = positional.pop()
        device, dtype, _, memory_format = torch._C._nn._parse_to(*positional, **kwargs)
        device = self.fake_device if device is None else CUDA if device.type == "cuda" else device
        dtype = dtype or self.dtype
        if device == self.fake_device:
            if dtype == self.dtype and not copy and memory_format is None:
                return self
            how = {} if memory_format is None else {"memory_format": memory_format}
            return torch.Tensor.to(self, dtype, copy=copy, **how)
        if "cuda" not in (device.type, self.fake_device.type):
            return torch.Tensor.to(self, device, dtype, copy=copy)
        memory_format = memory_format or torch.preserve_format
        if self.requires_grad and torch.is_grad_enabled():
            return _Move.apply(self, device, dtype, memory_format)
        return torch.empty_like(self, device=device, dtype=dtype, requires_grad=False, memory_format=memory_format)

    FakeTensor.to = to
    FakeTensor.cuda = lambda self, device=None, non_blocking=False, memory_format=None: to(self, CUDA)
    FakeTensor.cpu = lambda self, memory_format=None: to(self, "cpu")


def _copy_deeply_by_clone() -> None:
    """torch/_tensor.py: `Tensor.__deepcopy__` on a fake tensor corrupts the heap (torch 2.13, with stock torch too)."""

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with torch.no_grad():
                copy = self.detach().clone()
            kind = Parameter if isinstance(self, Parameter) else torch.Tensor.requires_grad_
            memo[id(self)] = kind(copy, self.requires_grad)
        return memo[id(self)]

    FakeTensor.__deepcopy__ = deepcopy


def _apply_to_modules_in_place() -> None:
    """torch/nn/modules/module.py: `_apply` (under `.to`, `.cuda`, `.half`) wants to swap fake parameters with new ones.

    Swapping fails where something holds a weak reference to them, as the tracker does; real parameters get new data
    and keep their identity and ties, so that is done here too.
    """
    original = Module._apply

    def apply(self: Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Module:
        if not any(isinstance(parameter, FakeTensor) for parameter in self._parameters.values()):
            return original(self, function, recurse)
        if recurse:
            for child in self.children():
                child._apply(function)
        for name, parameter in self._parameters.items():
            if parameter is None:
                continue
            assert parameter.grad is None, f"{name} is moved while it has a gradient"
            with torch.no_grad():
                applied = function(parameter)
                if applied is parameter:
                    continue
                if isinstance(applied, FakeTensor) and isinstance(parameter, FakeTensor):
                    parameter.data = applied
                    parameter.fake_device = applied.fake_device
                else:
                    self._parameters[name] = Parameter(applied, parameter.requires_grad)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = function(buffer)
        return self

    Module._apply = apply
