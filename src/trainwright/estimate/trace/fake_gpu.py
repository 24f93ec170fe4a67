"""What torch.cuda tells a script about the GPU it is to think it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

from trainwright.estimate.script_request import ScriptRequest
from trainwright.estimate.trace import fake_cuda, kernels, streams
from trainwright.estimate.trace.tracker import Tracker


def install(request: ScriptRequest, tracker: Tracker) -> None:
    """Let torch.cuda answer as if the GPU were there, for this process."""
    streams.install(device_count=request.local_ranks)
    kernels.DEVICE.compute_capability = request.compute_capability
    major, minor = request.compute_capability
    properties = SimpleNamespace(
        name=request.gpu_name,
        major=major,
        minor=minor,
        total_memory=request.capacity_bytes,
        multi_processor_count=100,
        warp_size=32,
        is_integrated=False,
        gcnArchName="",
    )

    def held(device: Any = None) -> int:
        return tracker.live_bytes()

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda._lazy_init = cuda.init = fake_tensor.init_gpu_context = nothing
    cuda.get_device_name = lambda device=None: request.gpu_name
    cuda.get_device_properties = lambda device=None: properties
    cuda.is_bf16_supported = lambda including_emulation=True: including_emulation or major >= 8
    cuda.is_tf32_supported = lambda: major >= 8
    cuda.get_arch_list = lambda: [f"sm_{major}{minor}"]
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(cuda, name, held)
        setattr(cuda.memory, name, held)
    cuda.mem_get_info = lambda device=None: (max(0, request.capacity_bytes - held()), request.capacity_bytes)
    cuda.memory.mem_get_info = cuda.mem_get_info
    cuda.memory_stats = cuda.memory.memory_stats = lambda device=None: {}
    for name in ("empty_cache", "reset_peak_memory_stats", "ipc_collect", "set_per_process_memory_fraction"):
        setattr(cuda, name, nothing)
        if hasattr(cuda.memory, name):
            setattr(cuda.memory, name, nothing)
    cuda.get_rng_state = lambda device="cuda": torch.zeros(16, dtype=torch.uint8)
    cuda.get_rng_state_all = lambda: [cuda.get_rng_state()] * request.local_ranks
    cuda.set_rng_state = cuda.set_rng_state_all = nothing
    cuda.manual_seed = cuda.manual_seed_all = cuda.random.manual_seed_all = nothing
    torch._C._get_accelerator = lambda check=False: fake_cuda.CUDA
    torch.accelerator.is_available = lambda: True
    torch.accelerator.device_count = lambda: request.local_ranks
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # what a build with CUDA has, and bitsandbytes looks for
    torch.Tensor.pin_memory = lambda self, device=None: self
    torch.Generator = _Generator
    _parse_numbers_as_devices()
    _let_real_tensors_move()


def _let_real_tensors_move() -> None:
    """`Tensor.to` and `.cuda` of a tensor with values: C++ looks for the device's guard before any mode is asked."""
    original = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(self, FakeTensor):
            return original(self, *args, **kwargs)
        like = args[0] if args and isinstance(args[0], torch.Tensor) else None
        asked = (like.device, like.dtype, *args[1:]) if like is not None else args
        named = {name: value for name, value in kwargs.items() if name != "copy"}
        device, dtype, _, memory_format = torch._C._nn._parse_to(*asked[:3], **named)
        if device is None or device.type != "cuda":
            return original(self, *args, **kwargs)
        moved: torch.Tensor = torch.ops.aten._to_copy(
            self, dtype=dtype, device=fake_cuda.CUDA, memory_format=memory_format
        )
        return moved

    def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **options: Any) -> torch.Tensor:
        return self.to("cuda")

    torch.Tensor.to, torch.Tensor.cuda = to, cuda


def _parse_numbers_as_devices() -> None:
    """`model.to(0)`: C++ asks which kind of accelerator is there."""
    parse = torch._C._nn._parse_to

    def parse_to(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is int:
            args = (torch.device("cuda", args[0]), *args[1:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        return parse(*args, **kwargs)

    torch._C._nn._parse_to = parse_to


class _Generator(torch._C.Generator):
    """A generator on the GPU draws nothing; one on the CPU draws as ever."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, device="cpu")
