"""The bookkeeping under the closed form: which gradients are added in place, whatever Python this is."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
from test_closed_form import CASES, model_of

from trainwright.estimate.closed import memory, operators, replayed
from trainwright.estimate.closed.tape import FP32, Tape, TapeParameter, Tensor
from trainwright.estimate.request import Request

SIZE = complex(1024)


def two_of_its_own(tape: Tape, x: Tensor) -> Tensor:
    return operators.add(tape, operators.scale(tape, x), operators.scale(tape, x))


def the_same_twice(tape: Tape, x: Tensor) -> Tensor:
    return operators.add(tape, x, x)


def a_view_and_one_of_its_own(tape: Tape, x: Tensor) -> Tensor:
    scaled = operators.scale(tape, x)
    return operators.add(tape, scaled, operators.reshaped(tape, x))


@pytest.mark.parametrize(
    "graph, pieces",
    [(two_of_its_own, 3), (the_same_twice, 2), (a_view_and_one_of_its_own, 3)],
)
def test_harm_16_gradients_are_added_in_place_where_nothing_else_holds_the_first(
    graph: Callable[[Tape, Tensor], Tensor], pieces: int
) -> None:
    """The result's gradient, one for each `scale`, and a sum where the first one is held or looked at elsewhere."""
    tape, weight = Tape(None), TapeParameter(1024, FP32, 1, trained=True)
    root = graph(tape, weight.tensor).node
    assert root is not None
    before = len(tape.events)
    tape.run_backward(root, tape.new(SIZE, FP32))
    sizes = [size.real for _, size in tape.events[before:]]
    assert sum(size > 0 for size in sizes) == pieces
    assert sum(sizes) == SIZE.real * FP32, "the weight keeps one gradient, the rest is freed"


SEVERAL = ("full", "full, packed", "full, eager", "fsdp2, lora, accumulated", "gemma2", "gpt2", "phi3", "t5", "bloom")


def predictions() -> list[Any]:
    found = []
    for data in (CASES[name] for name in SEVERAL):
        model, request = model_of(data["config"]), Request.parse(data)
        found.append([dataclasses.asdict(measure(model, request)) for measure in (memory, replayed)])
    return found


def test_harm_16_no_byte_depends_on_how_many_references_the_interpreter_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.14 borrows the references of local variables, and so counts fewer than 3.11."""
    expected, counted = predictions(), sys.getrefcount
    monkeypatch.setattr(sys, "getrefcount", lambda instance: counted(instance) - 2)
    assert predictions() == expected
