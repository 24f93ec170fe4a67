"""What is asked of a plan besides the job: `plan`, `train` and `tune` ask the same of the machine that they run on."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "standins" / "nvml"))

from nvml_standin import TWO_A100_TWO_V100, NvmlStandin

from trainwright.hardware.inventory import parse_inventory
from trainwright.job.loading import load_job
from trainwright.launch.planning import PlanFlags, plan_job
from trainwright.launch.train_run import plan_here
from trainwright.plan import wish as wishes
from trainwright.plan.options import ZERO
from trainwright.plan.wish import Wish
from trainwright.tune.tuning import TuneOptions, tune

JOB = {
    "name": "same",
    "model": {"name": "Qwen/Qwen2.5-0.5B"},
    "method": {"type": "lora"},
    "data": {"path": "rows.jsonl", "max_length": 512},
    "train": {"global_batch_size": 8},
}


class _Asked(Exception):  # noqa: N818
    """Ends a command where it has said what it wishes."""

    def __init__(self, wish: Wish) -> None:
        self.wish = wish


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A job file with 40 examples, on a machine of four GPUs where each thing that may be known is known."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "response": "b"}\n' * 40)
    path = tmp_path / "job.json"
    path.write_text(json.dumps(JOB | {"data": JOB["data"] | {"path": str(rows)}, "output_dir": str(tmp_path / "out")}))
    machine = parse_inventory("a100-80gb:4,host=256gib")
    monkeypatch.setattr("trainwright.hardware.local.local_inventory", lambda device: machine)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setattr(wishes, "lacking", lambda: ZERO)
    monkeypatch.setattr(wishes, "stored_runs", lambda: ("a run",))
    monkeypatch.setattr(wishes, "Calibration", lambda runs: ("corrected by", *runs))
    monkeypatch.setattr(wishes, "stored_answers", lambda: ("an answer",))
    return str(path)


def wished(monkeypatch: pytest.MonkeyPatch, command: str, job: str, *overrides: str) -> Wish:
    """Return what a command asks of the plan for this machine."""

    def choose(job: object, given: object, devices: object, wish: Wish) -> Any:
        raise _Asked(wish)

    for module in ("trainwright.launch.planning", "trainwright.launch.train_run", "trainwright.tune.tuning"):
        monkeypatch.setattr(f"{module}.choose", choose)
    loaded = load_job(job, overrides)
    with pytest.raises(_Asked) as caught:
        if command == "plan":
            plan_job(loaded, PlanFlags())
        elif command == "train":
            plan_here(loaded, None)
        else:
            tune(loaded, TuneOptions())
    return caught.value.wish


@pytest.mark.parametrize("overrides", [(), ("resources.gpus=2",), ("resources.ranks=4",)])
def test_plan_train_and_tune_wish_the_same(
    job: str, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    """All that is known reaches each of them; none leaves a field out."""
    plan, train, tune_wish = (wished(monkeypatch, name, job, *overrides) for name in ("plan", "train", "tune"))
    assert train.tracing is not None and 0 < train.tracing.from_share < 1
    assert plan.tracing is not None and plan.tracing.from_share == math.inf  # what has a closed form is not traced
    plan, train = (dataclasses.replace(wish, tracing=None) for wish in (plan, train))
    assert dataclasses.replace(plan, must_fit=False) == train
    assert dataclasses.replace(plan, must_fit=False, tuned=()) == tune_wish
    known = dataclasses.asdict(Wish())
    left_open = {"goal", "idle_by_goal", "keep", "tracing"} | ({"may_leave_idle"} if overrides else set())
    assert {name for name in known if getattr(plan, name) == getattr(Wish(), name)} == left_open
    assert plan.amount.samples == 40


def test_gpus_that_are_only_written_down_may_have_other_libraries(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that this machine lacks counts there, and each GPU that a layout leaves out need not be got."""
    caught: list[Wish] = []
    monkeypatch.setattr("trainwright.launch.planning.choose", lambda *asked: caught.append(asked[3]) or asked[:2])
    plan_job(load_job(job, []), PlanFlags(gpus="h100:4"))
    (wish,) = caught
    assert (wish.lacks, wish.may_leave_idle, wish.idle_by_goal) == ((), True, True)


@pytest.mark.parametrize("overrides", [(), ("resources.gpus=3",)])
def test_the_commands_plan_and_train_decide_the_same_layout(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """The real commands, on a machine of two A100 and two V100."""
    nvml = NvmlStandin.build(tmp_path_factory.mktemp("nvml"))
    path = tmp_path / "job.json"
    path.write_text(json.dumps(JOB | {"output_dir": str(tmp_path / "out")}))
    planned = nvml.python(TWO_A100_TWO_V100, "-m", "trainwright", "plan", str(path), *overrides, "--json")
    assert planned.returncode == 0, planned.stderr
    ready = nvml.python(TWO_A100_TWO_V100, "-m", "trainwright", "train", str(path), *overrides, "--dry-run")
    assert ready.returncode == 0, ready.stderr
    by_train = json.loads((tmp_path / "out" / "same" / "plan.json").read_text())
    assert by_train["layout"] == json.loads(planned.stdout)["layout"]
