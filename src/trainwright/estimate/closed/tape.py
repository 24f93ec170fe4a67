"""A step on tensors that have a size and nothing else, with autograd's own bookkeeping of what is kept and until when.

Memory is freed when the last reference to it goes, as in torch: the forward functions in `families` keep and drop
their tensors in the order in which transformers' modules do. `Size` counts bytes or elements as `fixed + j * each`:
what is there whatever the micro-batch, and what every sample of it adds, so that one pass serves all micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any, Final

Size = complex
Gradient = "Tensor | None"

HALF: Final = 2
FP32: Final = 4
"""A dtype is its bytes an element: bf16 and fp16 take the same."""


class Storage:
    """A piece of memory; recorded when it is taken and when its last reference goes."""

    __slots__ = ("bytes", "key", "tape")

    def __init__(self, tape: Tape, size: Size, part: str | None, stream: int = 0) -> None:
        self.tape, self.bytes = tape, size
        self.key = len(tape.parts)
        tape.parts.append(part or tape.default_part)
        if stream:
            tape.streams[self.key] = stream
        tape.events.append((self.key, size))

    @classmethod
    def still_there(cls, tape: Tape, key: int, size: Size) -> Storage:
        """Return memory that was taken earlier, under its key."""
        storage = cls.__new__(cls)
        storage.tape, storage.key, storage.bytes = tape, key, size
        return storage

    def __del__(self) -> None:
        self.tape.events.append((self.key, -self.bytes))


class Tensor:
    """A view of a storage, or of a weight (no storage: weights are counted elsewhere)."""

    __slots__ = ("dense", "dtype", "elements", "headed", "node", "storage", "view", "weight")

    def __init__(
        self,
        storage: Storage | None,
        elements: Size,
        dtype: int,
        node: GraphNode | None = None,
        *,
        dense: bool = True,
        weight: TapeParameter | None = None,
    ) -> None:
        self.storage, self.elements, self.dtype, self.node = storage, elements, dtype, node
        self.dense = dense
        self.weight = weight
        self.view = False
        """Looks at another tensor's memory, which the engine takes for a second owner."""
        self.headed = False
        """Laid out head by head, not token by token; flash attention lays its result out alike."""


class TapeParameter:
    """A parameter: what autocast and the engine know of it."""

    __slots__ = ("dtype", "elements", "gradient", "node", "rows", "stored", "tensor", "trained")

    def __init__(self, elements: int, dtype: int, rows: int, *, trained: bool, stored: int | None = None) -> None:
        self.elements, self.dtype, self.rows, self.trained = elements, dtype, rows, trained
        self.stored = stored or dtype
        """Dtype of a shard of it, which FSDP2 casts before it gathers."""
        self.gradient: Storage | None = None
        self.node = GraphNode(1 << 60, (), None, leaf=self) if trained else None
        self.tensor = Tensor(None, complex(elements), dtype, self.node, weight=self)


class GraphNode:
    """A step of the backward pass: whom it hands gradients to, with the size and dtype that they must have."""

    __slots__ = ("backward", "edges", "hook", "leaf", "order")

    def __init__(
        self,
        order: int,
        edges: Sequence[tuple[GraphNode, Size, int] | None],
        backward: Callable[[Tensor], Any] | None,
        leaf: TapeParameter | None = None,
    ) -> None:
        self.order, self.edges, self.backward, self.leaf = order, edges, backward, leaf
        self.hook: Callable[[], None] | None = None


def _edges_into(root: GraphNode) -> dict[GraphNode, int]:
    """Count how many edges lead to each node below `root`: as many gradients does it wait for (engine.cpp)."""
    found: dict[GraphNode, int] = {root: 0}
    stack = [root]
    while stack:
        for edge in stack.pop().edges:
            if edge is None:
                continue
            node = edge[0]
            if node not in found:
                found[node] = 0
                stack.append(node)
            found[node] += 1
    return found


class _AllRecomputedError(Exception):
    """All that the backward pass needs has been computed again (torch/utils/checkpoint.py, early stop)."""


class Region:
    """A stretch of the forward pass that keeps its inputs only and is run again when its first node goes backward."""

    def __init__(self, tape: Tape, run: Callable[[], Any]) -> None:
        self.tape, self.run = tape, run
        self.count = 0
        self.found: list[Any] | None = None

    def recompute(self) -> None:
        """Run again; fill what was not kept."""
        tape = self.tape
        outer = tape.region, tape.grad, tape.refilling, tape.autocast, tape.default_part
        self.found = []
        tape.region, tape.grad, tape.refilling, tape.autocast = None, True, self, tape.half
        tape.default_part = "recomputed"
        try:
            self.run()
        except _AllRecomputedError:
            pass
        finally:
            tape.region, tape.grad, tape.refilling, tape.autocast, tape.default_part = outer
            tape.casts.clear()


class Kept:
    """What one node keeps for its backward pass; inside a region its place in the order of keeping.

    Nodes let go of what they keep in the order in which they name it, and of what was computed again in the other
    one: Python ends a tuple from behind, so that the first kind stands in it the other way round.
    """

    __slots__ = ("place", "region", "storages")

    def __init__(self, storages: tuple[Storage | None, ...], region: Region | None) -> None:
        self.region = region
        self.storages: Any = None if region is not None else storages[::-1]
        if region is not None:
            self.place = region.count
            region.count += 1

    def unpack(self) -> Any:
        """Return the storages, which live on as long as the result is held."""
        if self.region is None:
            return self.storages
        if self.region.found is None:
            self.region.recompute()
        assert self.region.found is not None
        kept, self.region.found[self.place] = self.region.found[self.place], None
        return kept


@dataclass(frozen=True, slots=True)
class Recording:
    """The memory of one pass from its beginning to its end.

    `events`: key and size, negative where it is freed, 0 where rows are summed up (`sums`: their number and columns) or
    a thread first multiplies matrices. `streams`: of keys that are not on the default one. `left`: what is there at the
    end. `given_back`: keys of what was there before it began. `summed`: of gradients that were added to others, which
    the first micro-batch keeps. Keys are below `keys`.
    """

    events: Sequence[tuple[int, Size]]
    streams: Mapping[int, int]
    left: Sequence[tuple[int, Size]]
    given_back: frozenset[int]
    sums: Mapping[int, tuple[Size, int]]
    summed: frozenset[int]
    keys: int

    def as_first(self) -> Recording:
        """The same micro-step where no gradients are there yet: it keeps its own, and gives none back."""
        stay = self.summed | self.given_back
        events = [e for e in self.events if e[0] not in stay or e[1].real > 0 or e[1].imag > 0]
        left = [e for e in events if e[0] in self.summed]
        return replace(self, events=events, left=[*self.left, *left], given_back=frozenset())


class Tape:
    """The memory of one micro-step as a list of events, cut into stretches by `mark`."""

    def __init__(self, half: int | None) -> None:
        self.events: list[tuple[int, Size]] = []
        self.parts: list[str] = []
        self.streams: dict[int, int] = {}
        """Of what was not taken on the default stream, 0: the caching allocator keeps streams apart."""
        self.marks: list[tuple[str, int]] = []
        self.returned: set[int] = set()
        """Keys of what was there before the step began and was given back."""
        self.summed: set[int] = set()
        """Keys of gradients that are added to those which are there."""
        self.handles: dict[bool, int] = {}
        """Key of the event at which the forward pass, and the backward pass (True), first multiplies matrices."""
        self.sums: dict[int, tuple[Size, int]] = {}
        """By the key of their event: rows that are summed up, and their columns."""
        self.lasting: set[int] = set()
        """Keys of what one layer makes for all others; the last that needs it lets it go."""
        self.half = half
        """Dtype of autocast; None: it is off."""
        self.autocast: int | None = None
        self.casts: dict[TapeParameter, Tensor] = {}
        self.grad = True
        self.region: Region | None = None
        self.refilling: Region | None = None
        self.default_part = "temporaries"
        self.order = 0
        self.accumulate: Callable[[TapeParameter, list[Tensor]], None] = take_gradient
        """Called with a weight and a list of its gradient alone, from which it takes it."""

    def mark(self, name: str) -> None:
        """Begin a stretch."""
        self.marks.append((name, len(self.events)))

    def recording(self) -> Recording:
        """Return all that has happened so far; what holds memory may go afterwards."""
        events = tuple(self.events)
        gone = {key for key, size in events if size.real < 0 or size.imag < 0}
        left = [event for event in events if event[1] and event[0] not in gone]
        return Recording(
            events,
            dict(self.streams),
            left,
            frozenset(self.returned),
            dict(self.sums),
            frozenset(self.summed),
            len(self.parts),
        )

    def new(self, elements: Size, dtype: int, part: str | None = None) -> Tensor:
        """Allocate."""
        return Tensor(Storage(self, elements * dtype, part), elements, dtype)

    def given_back(self, size: Size, part: str) -> None:
        """Free what was there before the step began."""
        self.returned.add(len(self.parts))
        self.parts.append(part)
        self.events.append((len(self.parts) - 1, -size))

    def multiplies(self, *, backward: bool) -> None:
        """A thread's first product opens a cuBLAS handle, whose workspace is counted elsewhere."""
        if backward not in self.handles:
            self.handles[backward] = len(self.parts)
            self._nothing("workspaces")

    def _nothing(self, part: str) -> None:
        """Record that something happens here that is no memory of the course's."""
        self.events.append((len(self.parts), 0j))
        self.parts.append(part)

    def passing(self, *sizes: Size, part: str = "kernel temporaries") -> None:
        """Take memory and give it back at once, together."""
        end([Storage(self, size, part) for size in sizes])

    def keep(self, *tensors: Tensor | None) -> Kept:
        """Keep the memory of tensors for the backward pass, in the order of torch/csrc/autograd/generated/Functions.h:
        arguments by their names, then results by theirs."""
        storages = tuple(t.storage if t is not None else None for t in tensors)
        if self.refilling is not None:
            found = self.refilling.found
            assert found is not None
            found.append(storages)
            if len(found) == self.refilling.count:
                raise _AllRecomputedError
        return Kept(storages, self.region)

    def needs_gradient(self, *tensors: Tensor | None) -> bool:
        """Whether an operator on these is part of the graph."""
        if self.grad:
            for tensor in tensors:
                if tensor is not None and tensor.node is not None:
                    return True
        return False

    def link(self, out: Tensor, inputs: Sequence[Tensor | None], backward: Callable[[Tensor], Any]) -> Tensor:
        """Make `out` the result of a node with these inputs."""
        self.order += 1
        edges = [(t.node, t.elements, t.dtype) if t is not None and t.node is not None else None for t in inputs]
        out.node = GraphNode(self.order, edges, backward)
        return out

    @contextmanager
    def without_gradient(self) -> Iterator[None]:
        """Record no graph."""
        outer, self.grad = self.grad, False
        try:
            yield
        finally:
            self.grad = outer

    def checkpoint(self, run: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """`torch.utils.checkpoint` without reentry: keep the input, not what the nodes inside would keep."""
        if not self.grad:
            return run(hidden)
        assert self.region is None
        region = Region(self, lambda: run(Tensor(hidden.storage, hidden.elements, hidden.dtype, hidden.node)))
        self.region = region
        try:
            return run(hidden)
        finally:
            self.region = None

    def checkpoint_reentrant(self, run: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """`torch.utils.checkpoint` with reentry: forward without a graph, later once more with one."""
        if not self.grad or hidden.node is None:
            with self.without_gradient():
                return run(hidden)
        with self.without_gradient():
            out = run(hidden)
        kept = self.keep(hidden)
        elements, dtype = hidden.elements, hidden.dtype

        def backward(gradient: Tensor) -> tuple[Tensor | None]:
            (storage,) = kept.unpack()
            root = Leaf(None)
            again = Tensor(storage, elements, dtype, root)
            outer = self.grad, self.autocast, self.default_part
            self.grad, self.autocast, self.default_part = True, self.half, "recomputed"
            result = run(again)
            del again
            self.grad, self.autocast, self.default_part = outer
            self.casts.clear()
            assert result.node is not None
            self.run_backward(result.node, gradient)
            return (root.gradient,)

        result = Tensor(out.storage, out.elements, out.dtype)
        return self.link(result, [hidden], backward)

    def run_backward(self, root: GraphNode, gradient: Tensor) -> None:
        """torch/csrc/autograd/engine.cpp: nodes whose gradient is complete go, the youngest first."""
        waiting = _edges_into(root)
        buffers: dict[GraphNode, list[Tensor]] = {root: [gradient]}
        del gradient
        count = 0
        ready: list[tuple[int, int, GraphNode]] = [(-root.order, count, root)]
        outputs: list[Tensor | None]
        while ready:
            node = heappop(ready)[2]
            if node.hook is not None:
                node.hook()
            held = buffers.pop(node, None)
            if node.leaf is not None:
                if held:
                    self.accumulate(node.leaf, held)
                continue
            if isinstance(node, Leaf):
                node.gradient = held.pop() if held else None
                continue
            outputs = []  # a gradient that nobody wanted of the node before goes before this one computes
            outputs = self._outputs_of(node, held)
            del held
            node.backward = None
            for place, edge in enumerate(node.edges):
                if edge is None:
                    continue
                target = edge[0]
                output, outputs[place] = outputs[place], None
                if output is not None and target in buffers:
                    self._add(buffers[target], output)
                elif output is not None:
                    buffers[target] = [output]
                del output
                waiting[target] -= 1
                if not waiting[target]:
                    count += 1
                    heappush(ready, (-target.order, count, target))

    def _outputs_of(self, node: GraphNode, held: list[Tensor] | None) -> list[Tensor | None]:
        """The gradients that a node hands on, one for each of its edges; of a node that got none, none."""
        if not held:
            return [None] * len(node.edges)
        assert node.backward is not None, "the graph was already run"
        outputs = list(node.backward(held[0]))
        for place, edge in enumerate(node.edges):
            if edge is not None and outputs[place] is not None:
                outputs[place] = self._validated(outputs[place], edge[1], edge[2])
        return outputs

    def _validated(self, gradient: Tensor, elements: Size, dtype: int) -> Tensor:
        """`validate_outputs`: a gradient is summed to the shape and cast to the dtype of what it is for."""
        if gradient.elements != elements:
            rows = gradient.elements / elements.real if not elements.imag and elements.real > 1 else 0j
            gradient = self.new(elements, gradient.dtype)
            if rows:
                self.sums[len(self.parts)] = rows, round(elements.real)
                self._nothing("kernel temporaries")
        if gradient.dtype != dtype:
            gradient = self.new(elements, dtype)
        return gradient

    def _add(self, held: list[Tensor], new: Tensor) -> None:
        """`InputBuffer::accumulate`: in place when nobody else holds the first gradient."""
        first = held[0]
        elements, dtype, may_change = first.elements, max(first.dtype, new.dtype), first.dense and not first.view
        del first
        own = self.own(held)
        held.append(self.new(elements, dtype) if own is None or not may_change else Tensor(own, elements, dtype))

    def own(self, held: list[Tensor]) -> Storage | None:
        """Take the one tensor out of a list; return its memory where nothing else holds it.

        That is so where letting go of the tensor frees the memory; the event is then taken back. Reference counts do
        not answer this: they include references of the interpreter's own, which differ between versions of Python.
        """
        before = len(self.events)
        held.pop()
        if len(self.events) == before:
            return None
        key, size = self.events.pop()
        return Storage.still_there(self, key, -size)


def end(storages: list[Storage]) -> None:
    """Let go of them, the first one first."""
    storages.reverse()
    while storages:
        storages.pop()


class Leaf(GraphNode):
    """A tensor that is no parameter and receives a gradient; the graph keeps it alive as it would a parameter."""

    __slots__ = ("gradient", "storage")

    def __init__(self, storage: Storage | None) -> None:
        super().__init__(0, (), None)
        self.storage = storage
        self.gradient: Tensor | None = None


def take_gradient(weight: TapeParameter, held: list[Tensor]) -> None:
    """AccumulateGrad on a parameter without a gradient: it takes what it is given, or copies what others hold."""
    gradient = held[0]
    assert gradient.storage is not None
    tape, elements, dtype, dense = gradient.storage.tape, gradient.elements, gradient.dtype, gradient.dense
    del gradient
    own = tape.own(held)
    storage = tape.new(elements, dtype).storage if own is None or not dense else own
    assert storage is not None
    tape.parts[storage.key] = "gradients"
    weight.gradient = storage


def take_passing_gradient(weight: TapeParameter, held: list[Tensor]) -> None:
    """The same on a gathered weight, whose gradient goes when its unit reduces."""
    weight.gradient = held.pop().storage


def leave_gradient(weight: TapeParameter, held: list[Tensor]) -> None:
    """AccumulateGrad where a gradient's memory is there already: it is added in place, or copied to DDP's bucket."""
    gradient = held.pop()
    assert gradient.storage is not None
    gradient.storage.tape.summed.add(gradient.storage.key)


def hand_over_gradient(weight: TapeParameter, held: list[Tensor]) -> None:
    """DDP's last micro-batch: what was summed up is copied to the bucket and goes."""
    gradient = held[0]
    leave_gradient(weight, held)
    assert gradient.storage is not None
    gradient.storage.tape.given_back(gradient.elements * weight.dtype, "gradients")
