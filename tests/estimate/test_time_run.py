"""How long a run takes: steps, evaluations, start; GPU-hours; with a range."""

from __future__ import annotations

import pytest
from steps_in_time import LLAMA_7B, LORA, devices, model

from trainwright.estimate.request import Request
from trainwright.estimate.time import RunTime, run_time, step_time

GPUS = devices("a100-80gb:4")
REQUEST = Request(
    config=LLAMA_7B,
    precision="bf16",
    method=LORA,
    micro_batch_size=4,
    sequence_length=1024,
    strategy="ddp",
    world_size=4,
    evaluation_batch_size=8,
)


def run(**values: int) -> RunTime:
    found = model(LLAMA_7B)
    return run_time(found, REQUEST, GPUS, step_time(found, REQUEST, GPUS), **{"steps": 100} | values)


def test_a_run_is_its_steps_and_what_stands_around_them() -> None:
    step_s = step_time(model(LLAMA_7B), REQUEST, GPUS).step_s
    found = run()
    assert found.parts_s["steps"] == pytest.approx(100 * step_s)
    assert found.run_s == pytest.approx(sum(found.parts_s.values()))
    assert found.run_s > 100 * step_s
    assert found.low_s < found.run_s < found.high_s


def test_gpu_hours_are_those_of_all_gpus() -> None:
    found = run()
    assert found.gpu_hours == pytest.approx(found.run_s * 4 / 3600)
    assert found.low_gpu_hours < found.gpu_hours < found.high_gpu_hours


def test_evaluations_cost_a_forward_pass_each() -> None:
    """Shared among the ranks, without gradients: far less than training on as many samples."""
    without, one, three = (run(evaluations=n, evaluation_samples=1600) for n in (0, 1, 3))
    each = one.run_s - without.run_s
    assert three.run_s - without.run_s == pytest.approx(3 * each)
    training_on_them = 100 * step_time(model(LLAMA_7B), REQUEST, GPUS).step_s
    assert 0.15 * training_on_them < each < 0.5 * training_on_them


def test_every_start_loads_the_model_again() -> None:
    """S4-48: a run that was stopped and resumed starts twice."""
    assert run(starts=2).parts_s["start"] == pytest.approx(2 * run(starts=1).parts_s["start"])
