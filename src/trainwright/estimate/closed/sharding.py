"""FSDP2 around the layers of a step: what is gathered when, and what a reduce-scatter takes.

torch/distributed/fsdp/_fully_shard (2.13), `_fsdp_param_group.py` and `_fsdp_collectives.py`: a unit's weights are
gathered into one buffer and copied out of it, each into memory of its own; forward the buffer lives until the next unit
has gathered, backward the next unit is gathered while one computes. Gradients are copied into a buffer of the reduce
dtype that lives until the next unit reduces. Buffers to gather into and reduced gradients are taken on streams of their
own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal

from trainwright.estimate.closed.tape import FP32, Storage, Tape, TapeParameter

COMMUNICATION = "communication"
GATHERED = "gathered weights"
Accumulated = Literal["nothing", "whole", "shards"]
"""Gradients of earlier micro-batches, in fp32: whole until this one reduces them, or reduced by each."""
GATHERING, REDUCING = 1, 2
"""Streams: `all_gather_copy_in_stream` and `reduce_scatter_stream`."""


class Unit:
    """Parameters that are gathered and reduced together; sizes in bytes.

    `policy`: the dtype that they are gathered in, for which shards of another one are copied first; None: their own.
    """

    def __init__(self, weights: Iterable[TapeParameter], ranks: int, policy: int | None, *, reshards: bool) -> None:
        unique = list({id(weight): weight for weight in weights}.values())
        self.trained = [weight for weight in unique if weight.trained]
        own = [_rows_of_rank(weight, ranks) for weight in unique]
        cast = [n for n, w in zip(own, unique, strict=True) if policy is not None and w.stored != policy]
        self.shard_cast_bytes = (policy or 0) * sum(cast)
        self.pieces_bytes = [ranks * n * (policy or w.dtype) for n, w in zip(own, unique, strict=True)]
        self.gradient_shard = sum(_rows_of_rank(weight, ranks) for weight in self.trained)
        self.reshards = reshards
        self.buffer: Storage | None = None
        self.whole: deque[Storage] | None = None
        self.reduced = False


def _rows_of_rank(weight: TapeParameter, ranks: int) -> int:
    """Numbers of one rank's rows, padded: the first dimension is cut into equal pieces."""
    return -(-weight.rows // ranks) * (weight.elements // weight.rows)


class Sharding:
    """The order of gathering and reducing in one micro-step."""

    def __init__(self, tape: Tape, ranks: int, there: Accumulated, *, synchronizes: bool) -> None:
        self.tape, self.ranks, self.there = tape, ranks, there
        self.synchronizes = synchronizes
        """This micro-batch reduces its gradients; another one leaves them whole, in fp32."""
        self.last_buffer: Storage | None = None
        self.reducing: Storage | None = None
        self.order: list[Unit] = []
        self.kept: list[Storage] = []

    def before_forward(self, unit: Unit) -> None:
        """Gather, with the buffer of the unit before still there."""
        self._gather(unit)
        self._copy_out(unit)
        self.last_buffer, unit.buffer = unit.buffer, None

    def after_forward(self, unit: Unit) -> None:
        """Let the weights go."""
        if unit.reshards:
            _reshard(unit)
        self.order.append(unit)

    def finish_forward(self) -> None:
        """The root's forward is over."""
        self.last_buffer = None

    def before_backward(self, unit: Unit) -> None:
        """Gather unless that was done ahead, then gather the next one ahead."""
        if unit.whole is None:
            if unit.buffer is None:
                self._gather(unit)
            self._copy_out(unit)
            unit.buffer = None
        place = self.order.index(unit)
        if place > 0:
            ahead = self.order[place - 1]
            if ahead.whole is None and ahead.buffer is None:
                self._gather(ahead)

    def after_backward(self, unit: Unit) -> None:
        """Let the weights go; reduce the gradients."""
        unit.reduced = True
        reached = [weight for weight in unit.trained if weight.gradient is not None]
        if self.there == "whole":
            for weight in reached:
                weight.gradient = None
        _reshard(unit)
        if not self.synchronizes:
            self._keep_whole(unit)
            return
        self.reducing = None
        if not unit.gradient_shard:
            return
        tape = self.tape
        self.reducing = Storage(tape, complex(unit.gradient_shard * self.ranks * FP32), None)
        # `unsharded_grads.clear()`: a list lets go of its last first, but that one a loop's variable holds to the end.
        for weight in reversed(reached[:-1]):
            self._let_go(weight)
        reduced = Storage(tape, complex(unit.gradient_shard * FP32), "gradients", REDUCING)
        for weight in reached[-1:]:
            self._let_go(weight)
        if self.there != "shards":  # else it is added to what is there, and goes with the call
            self.kept.append(reduced)

    def _let_go(self, weight: TapeParameter) -> None:
        weight.gradient = None
        if self.there == "whole":
            self.tape.given_back(complex(weight.elements * FP32), "gradients")

    def _keep_whole(self, unit: Unit) -> None:
        """`to_accumulated_grad_if_needed`."""
        for weight in unit.trained:
            gradient, weight.gradient = weight.gradient, None
            if gradient is not None and weight.dtype != FP32:
                gradient = Storage(self.tape, complex(weight.elements * FP32), "gradients")
            if gradient is not None:
                self.kept.append(gradient)

    def finish_backward(self) -> None:
        """What no layer's input asked for, the root first; then the last buffer goes."""
        for unit in [self.order[-1], *self.order[:-1]]:
            if not unit.reduced:
                self.after_backward(unit)
        self.reducing = None

    def _gather(self, unit: Unit) -> None:
        tape = self.tape
        cast = None
        if unit.shard_cast_bytes:
            cast = Storage(tape, complex(unit.shard_cast_bytes), COMMUNICATION, GATHERING)
        unit.buffer = Storage(tape, complex(sum(unit.pieces_bytes)), COMMUNICATION, GATHERING)
        del cast

    def _copy_out(self, unit: Unit) -> None:
        unit.whole = deque(Storage(self.tape, complex(size), GATHERED) for size in unit.pieces_bytes)


def _reshard(unit: Unit) -> None:
    """Let the weights go, the first one first."""
    while unit.whole:
        unit.whole.popleft()
    unit.whole = None
