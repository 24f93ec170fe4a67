"""What runs measured, kept on the user's machine, and the predictions that it corrects."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.estimate.calibration import Calibration
from trainwright.estimate.figures import Memory, StepTime
from trainwright.estimate.measured_runs import (
    Kind,
    MeasuredFigures,
    MeasuredRun,
    Peaks,
    kind_of,
    record_run,
    stored_runs,
)
from trainwright.hardware.inventory_source import asked_inventory
from trainwright.job.schema import Job
from trainwright.plan.choose import choose
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import append
from trainwright.runs.writing import write_json_atomic

GIB = 2**30
MEMORY = Memory(
    allocated_bytes=10 * GIB,
    reserved_bytes=11 * GIB,
    device_bytes=12 * GIB,
    parts_bytes={"weights": 8 * GIB, "activations": 2 * GIB},
    outside_bytes={"CUDA context": GIB},
    peak="loss backward",
    evaluation_bytes=5 * GIB,
)
TIME = StepTime(
    step_s=2.0, low_s=1.5, high_s=3.0, parts_s={"matrix products": 1.5, "communication": 0.5}, limit="x", ranks_s=(1.5,)
)
KIND = Kind(gpu="h200", strategy="ddp", method="lora", precision="bf16", versions="torch 2.13")
PREDICTED = MeasuredFigures(memory=Peaks(allocated_bytes=100, reserved_bytes=110, device_bytes=120), token_s=1.0)


def measured(
    number: int,
    *,
    allocated: int = 100,
    reserved: int = 110,
    device: int = 120,
    token_s: float = 1.0,
    kind: Kind = KIND,
) -> MeasuredRun:
    """A run that was predicted to take 100, 110 and 120 bytes and a second a token."""
    peaks = Peaks(allocated_bytes=allocated, reserved_bytes=reserved, device_bytes=device)
    return MeasuredRun(
        run_id=f"{number:032x}", kind=kind, predicted=PREDICTED, measured=MeasuredFigures(memory=peaks, token_s=token_s)
    )


RUNS = st.lists(
    st.builds(
        measured,
        st.integers(0, 10**6),
        allocated=st.integers(40, 160),
        reserved=st.integers(160, 200),
        device=st.integers(200, 300),
        token_s=st.floats(0.1, 10),
    ),
    max_size=8,
)


@settings(deadline=None)
@given(RUNS, st.randoms())
def test_the_order_of_records_does_not_matter(runs: list[MeasuredRun], draw: Any) -> None:
    """S2-17, U-07: several processes append, in any order."""
    mixed = list(runs)
    draw.shuffle(mixed)
    assert Calibration(runs).memory(MEMORY, KIND) == Calibration(mixed).memory(MEMORY, KIND)
    assert Calibration(runs).time(TIME, KIND) == Calibration(mixed).time(TIME, KIND)


@settings(deadline=None)
@given(RUNS)
def test_a_corrected_figure_stays_within_twice_and_half_and_adds_up(runs: list[MeasuredRun]) -> None:
    """S2-17, U-07: a run that is far off is reported and not applied; parts still sum to what they are parts of."""
    calibration = Calibration(runs)
    memory, basis = calibration.memory(MEMORY, KIND)
    assert sum(memory.parts_bytes.values()) == memory.allocated_bytes <= memory.reserved_bytes <= memory.device_bytes
    assert sum(memory.outside_bytes.values()) == memory.device_bytes - memory.reserved_bytes
    assert memory.allocated_bytes >= MEMORY.allocated_bytes
    if basis.runs < 3:
        assert memory.reserved_bytes >= MEMORY.reserved_bytes
        assert memory.device_bytes >= MEMORY.device_bytes
    assert basis.runs + basis.differing == len(runs)
    time, _ = calibration.time(TIME, KIND)
    assert TIME.step_s / 2 <= time.step_s <= TIME.step_s * 2
    assert time.low_s <= time.step_s <= time.high_s
    assert sum(time.parts_s.values()) == pytest.approx(time.step_s)


def test_memory_goes_up_after_one_run_and_down_after_three_that_agree() -> None:
    """S2-17, U-07: never a prediction that got less safe without saying why."""
    more = Calibration([measured(1, reserved=121, device=131)])
    assert more.memory(MEMORY, KIND)[0].reserved_bytes == pytest.approx(12.1 * GIB)
    less = [measured(number, reserved=100 + number, device=105 + number) for number in range(1, 4)]
    assert Calibration(less[:2]).memory(MEMORY, KIND)[0] == MEMORY
    lower, basis = Calibration(less).memory(MEMORY, KIND)
    assert lower.reserved_bytes == pytest.approx(10.3 * GIB)  # the least favourable of the three
    assert lower.device_bytes - lower.reserved_bytes == pytest.approx(GIB, abs=10)
    assert basis.mark == "calibrated (3 runs)"
    undecided = [*less, measured(4, reserved=112, device=122)]
    assert Calibration(undecided).memory(MEMORY, KIND)[0].reserved_bytes >= MEMORY.reserved_bytes
    short_samples = [measured(number, allocated=80, reserved=88, device=98) for number in range(5)]
    assert Calibration(short_samples).memory(MEMORY, KIND)[0] == MEMORY


def test_what_lies_outside_the_allocator_is_off_by_bytes_not_by_a_factor() -> None:
    """S2-17, U-07: a context of 25 bytes instead of 10 is 15 bytes more for a model a hundred times as large too."""
    calibration = Calibration([measured(1, device=135)])
    memory, _ = calibration.memory(MEMORY, KIND)
    assert memory.device_bytes == MEMORY.device_bytes + 15
    assert memory.outside_bytes == {"CUDA context": GIB, "calibration": 15}


def test_a_run_that_is_far_off_is_reported_and_not_applied() -> None:
    """S2-17, U-07: other work on the GPU says nothing about an estimate."""
    calibration = Calibration([measured(1, device=400, token_s=2.5)])
    memory, basis = calibration.memory(MEMORY, KIND)
    assert (memory, basis.mark) == (MEMORY, "estimate")
    assert basis.note is not None and basis.note.startswith("measured differs: check: 1 run on h200, lora bf16, ddp")
    assert calibration.time(TIME, KIND)[0] == TIME


def test_time_is_corrected_by_other_kinds_of_run_only_where_there_is_none_of_the_same() -> None:
    """S2-17, U-07: a machine that is slow is slow for layouts that never ran on it as well."""
    other = dataclasses.replace(KIND, strategy="fsdp2")
    calibration = Calibration([measured(1, token_s=1.21)])
    own, own_basis = calibration.time(TIME, KIND)
    others, others_basis = calibration.time(TIME, other)
    assert own.step_s == others.step_s == pytest.approx(2.2)  # half way: the estimate counts as a run
    assert own_basis.note == "calibrated from 1 run on h200, lora bf16, ddp"
    assert others_basis.note == "calibrated from 1 run on h200, of other kinds"
    both = Calibration([measured(1, token_s=1.21), measured(2, token_s=1.0, kind=other)])
    assert both.time(TIME, other)[0].step_s == pytest.approx(2.0)
    assert calibration.memory(MEMORY, other)[0] == MEMORY
    for change in ({"gpu": "a100-80gb"}, {"versions": "torch 2.9"}):
        assert calibration.time(TIME, dataclasses.replace(KIND, **change))[0] == TIME
    login_node = dataclasses.replace(KIND, versions="")
    assert calibration.time(TIME, login_node)[0] == own


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Where the user's records lie."""
    return tmp_path / "data"


def finished_run(path: Path, *, gpus: str = "h200:2", slower: float = 1.2, extra_bytes: int = GIB) -> RunFolder:
    """A finished run of a 0.5 B model as `train` leaves it: its plan, and what the ranks measured."""
    job = Job.model_validate(
        {
            "name": "run",
            "task": "causal-lm",
            "model": {"name": "Qwen/Qwen2.5-0.5B-Instruct"},
            "method": {"type": "lora"},
            "data": {"path": "questions.jsonl", "max_length": 512},
        }
    )
    inventory = asked_inventory(gpus, "auto")
    job, plan = choose(job, set(), inventory.usable)
    folder = RunFolder(path)
    folder.create()
    write_json_atomic(folder.plan_json, plan.to_json())
    write_json_atomic(folder.resolved_json, job.model_dump(mode="json"))
    assert plan.estimate is not None and plan.estimate.time is not None
    memory, layout = plan.estimate.memory, plan.layout
    tokens = layout.global_batch_size * job.data.max_length
    for rank in range(layout.ranks):
        event = {
            "event": "measured",
            "attempt": 1,
            "rank": rank,
            "allocated_bytes": memory.allocated_bytes - rank,
            "reserved_bytes": memory.reserved_bytes,
            "device_bytes": memory.device_bytes + extra_bytes,
            "steps": 20,
            "step_s_median": plan.estimate.time.step_s * slower,
            "tokens_per_s": tokens / (plan.estimate.time.step_s * slower),
        }
        append(folder.events_jsonl, event)
    return folder


def test_a_run_changes_what_is_predicted_for_the_next_one(tmp_path: Path, data_dir: Path) -> None:
    """S2-17, U-07: measured, kept, and applied to a later prediction of that kind, which says so."""
    folder = finished_run(tmp_path / "run")
    assert record_run(folder, data_dir) is None
    layout = json.loads(folder.plan_json.read_text())["layout"]
    kind = kind_of(["h200"], strategy=layout["strategy"], method="lora", precision=layout["precision"])
    calibration = Calibration(stored_runs(data_dir))
    memory, basis = calibration.memory(MEMORY, kind)
    assert memory.device_bytes == MEMORY.device_bytes + GIB
    assert basis.mark == "calibrated (1 run)"
    time, _ = calibration.time(TIME, kind)
    assert time.step_s == pytest.approx(2.0 * 1.2**0.5)
    again = record_run(folder, data_dir)
    assert again is None and len(stored_runs(data_dir)) == 1  # one run, however often it is kept
    assert calibration.memory(MEMORY, dataclasses.replace(kind, gpu="h100-sxm"))[0] == MEMORY


def test_a_prediction_is_compared_as_it_was_before_calibration(tmp_path: Path, data_dir: Path) -> None:
    """S2-17, U-07: else every run would be corrected by half of what was left, towards nothing."""
    folder = finished_run(tmp_path / "run")
    plan = json.loads(folder.plan_json.read_text())
    first = {"memory": plan["estimate"]["memory"], "step_s": plan["estimate"]["time"]["step_s"]}
    plan["estimate"]["uncalibrated"] = first
    plan["estimate"]["time"]["step_s"] *= 1.2
    write_json_atomic(folder.plan_json, plan)
    assert record_run(folder, data_dir) is None
    (run,) = stored_runs(data_dir)
    assert run.predicted.token_s is not None and run.measured.token_s is not None
    assert run.measured.token_s / run.predicted.token_s == pytest.approx(1.2)


def test_what_is_kept_names_no_path_and_no_data(tmp_path: Path, data_dir: Path) -> None:
    """S2-17, house rules: figures, the GPU and versions."""
    assert record_run(finished_run(tmp_path / "secret-project"), data_dir) is None
    text = (data_dir / "calibration.jsonl").read_text()
    assert not any(word in text for word in (str(tmp_path), "secret", "questions", "Qwen"))
    assert (data_dir / "calibration.jsonl").stat().st_mode & 0o077 == 0


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path, data_dir: Path) -> None:
    """C01, U-07: a kill in the middle of a line, or somebody else's."""
    assert record_run(finished_run(tmp_path / "one"), data_dir) is None
    path = data_dir / "calibration.jsonl"
    whole = path.read_text()
    (entry,) = (json.loads(line) for line in whole.splitlines())
    nonsense: list[Any] = [
        entry | {"run_id": 7},
        entry | {"kind": {"gpu": "h200"}},
        entry | {"measured": {"memory": None, "token_s": -1.0}},
        entry | {"measured": {"memory": entry["measured"]["memory"] | {"device_bytes": 1}, "token_s": 1.0}},
        [1],
    ]
    path.write_text(whole + "".join(json.dumps(line) + "\n" for line in nonsense) + whole[: len(whole) // 2])
    assert len(stored_runs(data_dir)) == 1
    assert record_run(finished_run(tmp_path / "two"), data_dir) is None
    assert len(stored_runs(data_dir)) == 2


def test_several_processes_may_append(tmp_path: Path, data_dir: Path) -> None:
    """S2-17, U-07: runs end at the same time; none of them is lost."""
    folders = [finished_run(tmp_path / f"run-{number}") for number in range(4)]
    script = (
        "import sys; from pathlib import Path\n"
        "from trainwright.estimate.measured_runs import record_run\n"
        "from trainwright.runs.folder import RunFolder\n"
        "for _ in range(50): assert record_run(RunFolder(sys.argv[1]), Path(sys.argv[2])) is None\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, str(f.path), str(data_dir)]) for f in folders]
    assert [writer.wait() for writer in writers] == [0] * 4
    assert {run.run_id for run in stored_runs(data_dir)} == {folder.run_id for folder in folders}
    # Who sees a line half written by another begins a new one: an empty line may lie between, nothing is torn.
    lines = (data_dir / "calibration.jsonl").read_text().splitlines()
    assert len([json.loads(line) for line in lines if line]) == 200


def test_the_file_does_not_grow_without_end(tmp_path: Path, data_dir: Path) -> None:
    """S2-17, U-07: two files of about a mebibyte at most; the latest run is always among them."""
    folder = finished_run(tmp_path / "run")
    path = data_dir / "calibration.jsonl"
    data_dir.mkdir()
    for _ in range(3):
        with path.open("a") as file:
            file.write("x" * 2**20 + "\n")
        assert record_run(folder, data_dir) is None
    assert sum(file.stat().st_size for file in data_dir.iterdir()) < 2.1 * 2**20
    assert [run.run_id for run in stored_runs(data_dir)] == [folder.run_id]


def test_the_records_lie_where_the_user_keeps_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """House rules: XDG_DATA_HOME, where it is absolute; else ~/.local/share."""
    folder = finished_run(tmp_path / "run")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    assert record_run(folder) is None
    assert (tmp_path / "xdg/trainwright/calibration.jsonl").exists()
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert stored_runs() == ()
    assert record_run(folder) is None
    assert (tmp_path / "home/.local/share/trainwright/calibration.jsonl").exists()
    assert len(stored_runs()) == 1


def test_a_home_that_cannot_be_written_to_ends_no_run(tmp_path: Path) -> None:
    """S2-17, U-07: a reason comes back, and no error; likewise for a run that has nothing to tell."""
    folder = finished_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    reason = record_run(folder, tmp_path / "file" / "trainwright")
    assert reason is not None and "nothing was kept" in reason
    target = tmp_path / "elsewhere"
    (tmp_path / "data").mkdir()
    (tmp_path / "data/calibration.jsonl").symlink_to(target)
    assert record_run(folder, tmp_path / "data") is not None and not target.exists()
    folder.events_jsonl.unlink()
    assert record_run(folder, tmp_path / "good") is not None
    folder.plan_json.write_text("{")
    assert record_run(folder, tmp_path / "good") is not None
    assert not (tmp_path / "good").exists()
    assert stored_runs(tmp_path / "file") == ()
