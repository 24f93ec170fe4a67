"""Host memory of the processes of a run, by what fills it: libraries, loading, offload, checkpoints; torch-free.

Counted is what only the end of a process gives back: private and page-locked memory, and library code once a node.
The page cache is not: tokens are read with `pread`, and a checkpoint that is loaded in the dtype it is stored in stays
mapped, so that all ranks of a node share one copy that the kernel may drop (transformers 5.23, safetensors 0.8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from trainwright.anatomy.adapters import Lora, adapters
from trainwright.anatomy.parameters import trainable_parameters
from trainwright.anatomy.parts import Anatomy
from trainwright.estimate.cache import Recent
from trainwright.estimate.closed import memory
from trainwright.estimate.figures import HostMemory, Memory
from trainwright.estimate.offload import DTYPE_BYTES, Shape, offloaded_bytes, pinned_bytes
from trainwright.estimate.request import Request

MIB: Final = 2**20
_STORED: Final[Mapping[str, str]] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_FEED: Final = (3, 4)
"""Batches under way at a time (`trainwright.train.feeding`) and tensors of int64 in each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessMemory:
    """What the processes of a run take before any model is there, in bytes: estimates, with what they rest on.

    Measured with Python 3.11, torch 2.13, transformers 5.23, peft 0.21 and DeepSpeed 0.19.8 on Linux (x86-64, glibc
    2.36), one thread a rank. CUDA and NCCL are published: the first tensor on a GPU adds 1203 MiB to what is resident,
    and 1422 MiB where a communicator is opened too (github.com/pytorch/pytorch/issues/106511; torch 2.0, CUDA 11.8).
    Some of that is code that ranks share, so that several of them need less.
    """

    rank_bytes: int = 280 * MIB
    deepspeed_bytes: int = 50 * MIB
    cuda_bytes: int = 1203 * MIB
    communicator_bytes: int = 219 * MIB
    code_bytes: int = 70 * MIB
    """Library code, mapped once for all ranks."""
    launcher_bytes: int = 30 * MIB
    prepare_bytes: int = 180 * MIB
    """Tokenizes the data before the ranks start."""

    def of_rank(self, request: Request) -> int:
        """Private memory of a rank with its libraries loaded."""
        zero = self.deepspeed_bytes if request.strategy.startswith("zero") else 0
        communicator = self.communicator_bytes if request.world_size > 1 else 0
        cuda = self.cuda_bytes + communicator if request.device == "cuda" else 0
        return self.rank_bytes + zero + cuda


def host_memory(
    anatomy: Anatomy,
    request: Request,
    ranks_on_node: int,
    *,
    step: Memory | None = None,
    merge: bool = False,
    processes: ProcessMemory = ProcessMemory(),
) -> HostMemory:
    """Return the memory of rank 0, which has the most to hold, and of a whole node, at their peaks.

    `step` is what a step takes on the device, which is the host itself in a CPU run; None: the closed form's answer.
    `merge` is `method.merge`: at the end rank 0 loads the base again, in fp32.
    """
    model = _model_of(anatomy, request)
    held = offloaded_bytes(request, model.trained, model.frozen)
    if request.device == "cpu":
        found = step or memory(anatomy, request)
        lasting = ("weights", "adapters", "optimizer") + (("gradients",) if request.strategy == "ddp" else ())
        rest = {part: found.parts_bytes.get(part, 0) for part in lasting}
        during = dict(found.parts_bytes)
    else:
        rest, during = {}, {"batches": _batches(request)}
    held |= rest
    loading = _loading(model, request)
    phases: dict[str, tuple[Mapping[str, int], Mapping[str, int]]] = {
        "loading": ({"loading": loading[0]}, {"loading": loading[1]}),
        "training": (held | during, held | during),
        "saving": (held | _saving(model, request, first=True), held | _saving(model, request, first=False)),
        "exporting": (held | _exporting(model, request, merge=merge), held),
    }
    on_node = {name: _total(first) + (ranks_on_node - 1) * _total(other) for name, (first, other) in phases.items()}
    peak = max(on_node, key=lambda name: on_node[name])
    heaviest = max((first for first, _ in phases.values()), key=_total)
    rank_bytes = processes.of_rank(request)
    ranks_bytes = ranks_on_node * rank_bytes + on_node[peak]
    return HostMemory(
        rank_parts_bytes={"libraries": rank_bytes} | {part: size for part, size in heaviest.items() if size},
        node_bytes=processes.code_bytes + processes.launcher_bytes + max(ranks_bytes, processes.prepare_bytes),
        peak=peak,
    )


def loading_bytes(anatomy: Anatomy, request: Request) -> tuple[int, int]:
    """Return what rank 0, and each other rank, holds at most of a model while it comes to its device, in bytes."""
    return _loading(_model_of(anatomy, request), request)


@dataclass(frozen=True)
class _Model:
    """Tensors of a model as the workers treat them."""

    trained: tuple[Shape, ...]
    frozen: tuple[Shape, ...]
    has_adapters: bool
    stacked: int
    """Weights of experts, which transformers puts together from those of a checkpoint."""
    stored: str | None
    """Dtype of the checkpoint, None where the config does not say."""

    @staticmethod
    def of(anatomy: Anatomy, request: Request) -> _Model:
        method, base = request.method, anatomy.parameters()
        stacked = sum(prod(weight.weight_shape()) for _, weight in anatomy.weights() if weight.kind == "experts")
        stored = _stored_dtype(request.config)
        if method.type == "full":
            trained = trainable_parameters(anatomy, method.freeze)
            frozen = tuple(shape for name, shape in base.items() if name not in trained)
            return _Model(tuple(trained.values()), frozen, False, stacked, stored)
        lora = Lora(method.r, "all-linear" if method.targets == "all-linear" else list(method.targets))
        shapes = [
            shape
            for adapter in adapters(anatomy, lora).values()
            for shape in (
                (adapter.copies * adapter.rank, adapter.columns),
                (adapter.rows, adapter.copies * adapter.rank),
            )
        ]
        return _Model(tuple(shapes), tuple(base.values()), True, stacked, stored)

    @property
    def trained_size(self) -> int:
        """Number of trained parameters."""
        return _size(self.trained)

    @property
    def saved(self) -> tuple[Shape, ...]:
        """Tensors that a checkpoint holds."""
        return self.trained if self.has_adapters else self.trained + self.frozen

    @property
    def base_size(self) -> int:
        """Number of parameters without adapters."""
        return _size(self.frozen) + (0 if self.has_adapters else self.trained_size)


_models: Recent[_Model] = Recent()


def _model_of(anatomy: Anatomy, request: Request) -> _Model:
    return _models.of((anatomy, request.method, request.config), None, lambda: _Model.of(anatomy, request))


def _loading(model: _Model, request: Request) -> tuple[int, int]:
    """The model on the CPU before its device has it, on rank 0 and on each other rank.

    Under FSDP2 and ZeRO rank 0 alone loads it, and hands it out.
    """
    if request.method.type == "qlora":
        # transformers puts each tensor on the GPU as it packs it.
        return 4 * model.trained_size, 4 * model.trained_size
    zero = request.strategy.startswith("zero")
    alone = zero or request.strategy in ("fsdp2", "fsdp1")
    element = DTYPE_BYTES[request.base_dtype]
    copied = model.stacked if model.stored == request.base_dtype else model.base_size
    own = element * copied + (4 * model.trained_size if model.has_adapters else 0)
    if request.device == "cuda":
        return own, 0 if alone else own
    whole = element * model.base_size if model.stored != request.base_dtype else own
    if zero:
        # Handed on tensor by tensor, of which rank 0 lets go, before DeepSpeed begins.
        begun = _under_zero(model, request)
        return max(whole, begun), begun
    shard = element * model.base_size // request.world_size
    return (whole + shard, shard) if alone else (whole, whole)


def _under_zero(model: _Model, request: Request) -> int:
    """Bytes of a rank at most while DeepSpeed begins, on a CPU.

    What is trained is laid flat beside itself; then each rank copies its part in fp32 and makes a gradient of zeros for
    it (`initialize_optimizer_states`, DeepSpeed 0.19.8). ZeRO-3 cuts each tensor as it comes, whole.
    """
    element, ranks = DTYPE_BYTES[request.precision], request.world_size
    trained = model.trained_size
    weights, begun = element * (_size(model.frozen) + trained), 2 * 4 * trained // ranks
    if request.strategy == "zero3":
        return weights // ranks + max(begun, element * max(map(prod, (*model.trained, *model.frozen))))
    return weights + max(begun, element * trained)


def _saving(model: _Model, request: Request, *, first: bool) -> dict[str, int]:
    """A rank's share of the weights or of the optimizer's state, whichever is more, and a tensor on its way."""
    ranks = request.world_size
    largest = 4 * max(map(prod, model.saved))
    weights = 4 * _size(model.saved)
    own = _share(weights, largest, 1 if model.has_adapters else ranks)
    if model.has_adapters and not first:
        own = 0
    states = _share(_optimizer_bytes(model, request), largest, ranks)
    on_its_way = largest if request.device == "cpu" and request.strategy not in ("single", "ddp") else 0
    return {"checkpoint": max(own, states) + on_its_way}


def _exporting(model: _Model, request: Request, *, merge: bool) -> dict[str, int]:
    """The whole result in fp32 on rank 0, and once more in the dtype that the model came in."""
    whole = 4 * _size(model.saved)
    if model.has_adapters:
        return {"final model": whole + (4 * model.base_size if merge else 0)}
    cast = DTYPE_BYTES[model.stored] * _size(model.saved) if model.stored in ("bf16", "fp16") else 0
    return {"final model": whole + cast}


def _optimizer_bytes(model: _Model, request: Request) -> int:
    """State of the whole optimizer: two moments, one byte each in 8 bits, or Adafactor's rows and columns."""
    if request.optimizer == "adafactor":
        return sum(4 * (prod(s[:-1]) + prod((*s[:-2], s[-1])) if len(s) >= 2 else prod(s)) for s in model.trained)
    return (2 if request.optimizer == "adamw_8bit" else 8) * model.trained_size


def _batches(request: Request) -> int:
    """Page-locked tensors on their way to the GPU; those of an evaluation have a size of their own."""
    waiting, tensors = _FEED
    sizes = [request.micro_batch_size, request.evaluation_batch_size or 0]
    length = request.sequence_length + (request.target_length or 0)
    return sum(waiting * tensors * pinned_bytes(8 * size * length) for size in sizes)


def _share(whole: int, largest: int, ranks: int) -> int:
    """Bytes of the fullest of `ranks` files, to which whole tensors are dealt."""
    return whole if ranks == 1 else max(-(-whole // ranks), min(largest, whole))


def _stored_dtype(config: Mapping[str, Any]) -> str | None:
    return _STORED.get(str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."))


def _size(shapes: Sequence[Shape]) -> int:
    return sum(map(prod, shapes))


def _total(parts: Mapping[str, int]) -> int:
    return sum(parts.values())
