"""Every allocation and free of a run, with the operator, phase and stream it happened in and the part it belongs to."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainwright.estimate.trace import autocast, engine, streams, temporaries
from trainwright.estimate.trace.answers import INDEXED, ITEM, NONZERO, ONE_HOT, Answers, has_mask
from trainwright.estimate.trace.fake_cuda import DEVICE_QUERY, META
from trainwright.estimate.trace.memo import Memo

aten = torch.ops.aten


class TracePhase(NamedTuple):
    """A stretch of the run: what is done, in which step (0 before the first)."""

    name: str
    step: int


class Record(NamedTuple):
    """One allocation (`size_bytes` > 0) or free (< 0), as `allocator.Event` has it, with where it happened."""

    key: int
    size_bytes: int
    stream: int
    phase: TracePhase
    operator: str
    held: bool = False


class Records(Protocol):
    """What is known of the memory of a run: `records` in order, and the part of a key where it is known."""

    records: list[Record]
    parts: dict[int, str]
    operators: int


class Tracker(TorchDispatchMode):
    """Records the memory of all tensors on one type of device while it is active.

    `capability` is that of the fake CUDA device, None for the CPU, where kernels take nothing for themselves that the
    caching allocator would see. `vocabulary` marks logits: tensors whose last dimension it is.
    """

    _paused = 0

    def __init__(
        self, device_type: str, answers: Answers, *, capability: tuple[int, int] | None, vocabulary: int | None
    ) -> None:
        super().__init__()
        self.records: list[Record] = []
        self.parts: dict[int, str] = {}
        """Part of the memory a key belongs to, where it is known."""
        self.phase = TracePhase("setup", 0)
        self.operators = 0
        """Run in the steps; building a model takes a few more the first time in a process."""
        self._device_type = device_type
        self._answers = answers
        self._capability = capability
        self._vocabulary = vocabulary
        self._live: dict[int, tuple[int, int, int]] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._shared: set[int] = set()
        """Storages that a stream has used besides the one they belong to."""
        self._held: list[tuple[int, int]] = []
        """Position and key of what was freed while the GPU may still use it on another stream."""
        self._last_key = 0
        self._handles: set[bool] = set()
        self._sole_owner = engine.sole_owner()
        self._dtensor: type | None = None
        self._memo = Memo()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave out the wrapper that keeps torch.compile away from each call; nothing is compiled here."""
        return False

    def live_bytes(self) -> int:
        """Return what is held now."""
        return sum(size for _, size, _ in self._live.values())

    def label(self, tensors: Iterable[torch.Tensor], part: str) -> None:
        """Say which part of the memory the storages of tensors are; a later label wins."""
        for tensor in tensors:
            tensor = getattr(tensor, "_local_tensor", tensor)
            held = self._live.get(tensor.untyped_storage()._cdata)
            if held is not None:
                self.parts[held[0]] = part

    @staticmethod
    @contextmanager
    def paused() -> Iterator[None]:
        """Record nothing meanwhile."""
        Tracker._paused += 1
        try:
            yield
        finally:
            Tracker._paused -= 1

    def position(self) -> int:
        """Return how many records there are."""
        return len(self.records)

    def reached(self, position: int) -> None:
        """Let memory be taken again that was freed up to a position."""
        done = [key for freed, key in self._held if freed < position]
        self._held = [(freed, key) for freed, key in self._held if freed >= position]
        for key in done:
            self.records.append(Record(key, 0, streams.current_number(), self.phase, "free"))

    def used_on(self, tensor: torch.Tensor, stream: int) -> None:
        """Note that the memory of a tensor is used on a stream."""
        identity = tensor.untyped_storage()._cdata
        if identity in self._live and self._live[identity][2] != stream:
            self._shared.add(identity)

    def __enter__(self) -> Tracker:
        super().__enter__()
        self._observed = streams.observed_by(self)
        self._observed.__enter__()
        distributed_tensor = sys.modules.get("torch.distributed.tensor")
        self._dtensor = distributed_tensor.DTensor if distributed_tensor is not None else None
        # FSDP frees and takes gathered weights with `resize_`, which passes no dispatcher.
        self._resize = torch.UntypedStorage.resize_
        tracker, original = self, self._resize

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            tracker._resized(storage, int(size))
            return result

        torch.UntypedStorage.resize_ = resize
        autocast.observers.append(self._weight_cast)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._observed.__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize
        autocast.observers.remove(self._weight_cast)
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if Tracker._paused:
            return func(*args, **(kwargs or {}))
        if self._dtensor is not None and any(issubclass(kind, self._dtensor) for kind in types):
            return NotImplemented  # DTensor calls again with its local tensors
        if func is DEVICE_QUERY:
            fake_cuda = self._device_type == "cuda" and args[0].device.type == "cuda"
            return META if fake_cuda else func(*args)
        if engine.is_engine_sum(func, args, kwargs) and self._is_summed_in_place(*args):
            aten.add_.Tensor(*args)
            return args[0]
        if (in_place := engine.in_place(func, args)) is not None:
            in_place(*args, **(kwargs or {}))
            return args[0]
        self.operators += self.phase.step > 0
        kwargs = kwargs or {}
        if isinstance(_first_tensor(args), FakeTensor):
            return self._on_fake(func, args, kwargs)
        return self._record(func, args, self._memo.call(func, args, kwargs))

    def _is_summed_in_place(self, a: Any, b: Any) -> bool:
        """Whether the engine adds a gradient to another where that lies, which nobody else holds."""
        alike = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape
        return alike and a.dtype == b.dtype and engine.references(a) == self._sole_owner and engine.is_dense(a)

    def _on_fake(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        answers = self._answers
        if func is ITEM and args[0].constant is None:
            self.reached(self.position())
            return answers.item(args[0])
        if func is NONZERO:
            return self._record(func, args, answers.nonzero(args[0]))
        if func in INDEXED and has_mask(args):
            indices = answers.as_indices(args[1])
            self._add_all(indices, "aten::nonzero")
            args = (args[0], indices, *args[2:])
        if func is ONE_HOT:
            answers.note_one_hot(args[0], args[1], args[2])
        return self._record(func, args, self._memo.call(func, args, kwargs))

    def _weight_cast(self, cast: torch.Tensor) -> None:
        self.label([cast], "weight casts")

    def _record(self, func: Any, args: tuple[Any, ...], out: Any) -> Any:
        name = func._schema.name
        self._add_all(reversed(out) if name in temporaries.LAST_OUTPUT_FIRST else tree_leaves(out), name)
        if self._capability is None:
            return out
        if name in temporaries.MATRIX_PRODUCTS:
            self._open_handle()
        sizes = temporaries.of_operator(name, args, self._capability)
        keys = [self._allocate(size, name) for size in sizes]
        for key, size in zip(keys, sizes, strict=True):
            self.parts[key] = "kernel temporaries"
            self._append(key, -size, name)
        return out

    def _open_handle(self) -> None:
        """Take the workspace of a thread's cuBLAS handle when it first multiplies."""
        backward = engine.in_backward()
        if backward in self._handles or self.phase.step == 0:
            return
        self._handles.add(backward)
        assert self._capability is not None
        key = self._allocate(temporaries.cublas_workspace_bytes(self._capability), "cublas")
        self.parts[key] = "workspaces"

    def _add_all(self, values: Iterable[Any], operator: str) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                self._add(value, operator)

    def _add(self, tensor: torch.Tensor, operator: str) -> None:
        if tensor.device.type != self._device_type:
            return
        storage = tensor.untyped_storage()
        identity = storage._cdata
        if identity in self._live:
            return
        size, stream = storage.nbytes(), streams.current_number()
        key = self._allocate(size, operator)
        self._live[identity] = (key, size, stream)
        self._references[identity] = weakref.ref(storage, lambda _: self._gone(identity))
        if stream != 0:
            self.parts[key] = "communication"
        elif tensor.dim() > 1 and tensor.shape[-1] == self._vocabulary:
            self.parts[key] = "logits and loss"
        elif engine.in_backward() and torch.is_grad_enabled():
            self.parts[key] = "recomputed"

    def _allocate(self, size: int, operator: str) -> int:
        self._last_key += 1
        self._append(self._last_key, size, operator)
        return self._last_key

    def _append(self, key: int, size: int, operator: str, *, held: bool = False) -> None:
        if size:
            self.records.append(Record(key, size, streams.current_number(), self.phase, operator, held))

    def _free(self, identity: int, key: int, size: int, operator: str) -> None:
        held = identity in self._shared
        self._shared.discard(identity)
        self._append(key, -size, operator, held=held)
        if held:
            self._held.append((self.position() - 1, key))

    def _gone(self, identity: int) -> None:
        held = self._live.pop(identity, None)
        self._references.pop(identity, None)
        self._answers.forget(identity)
        if held is not None:
            self._free(identity, held[0], held[1], "free")

    def _resized(self, storage: torch.UntypedStorage, size: int) -> None:
        identity = storage._cdata
        held = self._live.get(identity)
        if held is None or held[1] == size:
            return
        self._free(identity, held[0], held[1], "resize_")
        part = self.parts.get(held[0])
        key = self._allocate(size, "resize_")
        self.parts[key] = "gathered weights" if part in (None, "communication") else part
        self._live[identity] = (key, size, streams.current_number())


def _first_tensor(args: tuple[Any, ...]) -> torch.Tensor | None:
    return next((argument for argument in args if isinstance(argument, torch.Tensor)), None)
