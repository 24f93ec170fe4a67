"""Layouts looked at closely: what the quick estimate would take and a replay or a trace refuses is not planned."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from trainwright.anatomy import anatomy, read_config
from trainwright.errors import ExitCode, UserError
from trainwright.estimate.closed import memory, replayed
from trainwright.estimate.figures import Memory
from trainwright.estimate.request import Request
from trainwright.estimate.traced import traced_memory
from trainwright.hardware.catalog import GpuSpec, catalog
from trainwright.hardware.inventory import parse_inventory
from trainwright.job.loading import load_job
from trainwright.launch.train_run import plan_on
from trainwright.plan.choose import Plan, choose
from trainwright.plan.confirmed import Tracing
from trainwright.plan.wish import Wish

SMALL = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
}
STEP = Request(config=SMALL, micro_batch_size=4, sequence_length=512, gradient_accumulation_steps=2)


def planned(tmp_path: Path, gpus: str, tracing: Tracing | None, *overrides: str, **wished: object) -> Plan:
    """The plan for a 0.5 B model whose largest micro-batches nearly fill the card."""
    path = tmp_path / "job.yaml"
    job = {
        "name": "big",
        "model": {"name": "Qwen/Qwen2.5-0.5B-Instruct"},
        "method": {"type": "full"},
        "data": {"path": "train.jsonl", "max_length": 896},
        "train": {"global_batch_size": 512},
    }
    path.write_text(yaml.safe_dump(job))
    loaded = load_job(str(path), overrides)
    inventory = parse_inventory(gpus)
    wish = Wish(host=inventory.host, tracing=tracing, **wished)  # type: ignore[arg-type]
    return choose(loaded.job, {"data.path"}, inventory.devices, wish)[1]


def larger_by(factor: float, asked: list[Request]) -> Callable[[Request, GpuSpec | None], Memory]:
    """What a trace would say that finds more reserved than the closed form does."""

    def traced(request: Request, gpu: GpuSpec | None) -> Memory:
        asked.append(request)
        found = replayed(anatomy(read_config(request.config)), request, gpu)
        more = round(found.reserved_bytes * (factor - 1))
        return dataclasses.replace(
            found, reserved_bytes=found.reserved_bytes + more, device_bytes=found.device_bytes + more
        )

    return traced


def by_quick_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Plan:
    """The plan that nothing confirms."""
    with monkeypatch.context() as patch:
        patch.setattr("trainwright.plan.confirmed.replayed", memory)
        return planned(tmp_path, "h100-80gb:1", None, *overrides)


def share(plan: Plan, request: Request, way: Callable[..., Memory]) -> float:
    """What a step takes of the plan's GPU, estimated this way."""
    assert plan.estimate is not None and plan.estimate.capacity is not None
    found = way(anatomy(read_config(request.config)), request, catalog().gpus["h100"])
    return found.device_bytes / plan.estimate.capacity.total_bytes


def test_what_a_replay_refuses_is_not_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 x 32 would pass by the quick estimate; an H100 has run out of memory with such a batch of 1,024 and a mask."""
    quick = by_quick_estimate(tmp_path, monkeypatch, "data.max_length=1056")
    plan = planned(tmp_path, "h100-80gb:1", None, "data.max_length=1056")
    assert quick.layout.micro_batch_size == 16 and plan.layout.micro_batch_size == 8
    refused, taken = quick.ranked[0].request, plan.ranked[0].request
    assert share(plan, refused, memory) < 0.95 < share(plan, refused, replayed)
    assert plan.estimate is not None
    assert plan.estimate.used_share == pytest.approx(share(plan, taken, replayed))


def test_what_only_the_quick_estimate_refuses_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = by_quick_estimate(tmp_path, monkeypatch, "data.max_length=4608")
    plan = planned(tmp_path, "h100-80gb:1", None, "data.max_length=4608")
    assert plan.layout.micro_batch_size > quick.layout.micro_batch_size
    taken = plan.ranked[0].request
    assert share(plan, taken, replayed) < 0.95 < share(plan, taken, memory)
    peaks = [c.estimate.used_share for c in plan.ranked if c.why_not is None]
    assert all(peak is not None and peak <= 0.95 for peak in peaks), "what stayed in doubt counts as too big"


def test_what_the_trace_refuses_is_not_planned(tmp_path: Path) -> None:
    asked: list[Request] = []
    without = planned(tmp_path, "h100-80gb:1", None)
    plan = planned(tmp_path, "h100-80gb:1", Tracing(larger_by(1.15, asked)))
    assert plan.layout != without.layout
    refused, taken = (next(t for t in plan.traces if ("needs" in t) is fails) for fails in (True, False))
    assert f"{without.layout.micro_batch_size} x {without.layout.gradient_accumulation_steps}" in refused
    assert f"{plan.layout.micro_batch_size} x {plan.layout.gradient_accumulation_steps}" in taken
    assert plan.estimate is not None and plan.estimate.used_share is not None
    assert plan.estimate.used_share < 0.95
    assert len(asked) == len(plan.traces)
    assert {request.gradient_accumulation_steps for request in asked} == {2}, "the later micro-steps are alike"
    assert plan.to_json()["traces"] == list(plan.traces)


def test_a_plan_that_the_trace_allows_stays_and_has_its_figures(tmp_path: Path) -> None:
    without = planned(tmp_path, "h100-80gb:1", None)
    plan = planned(tmp_path, "h100-80gb:1", Tracing(larger_by(1.01, [])))
    assert plan.layout == without.layout
    assert plan.estimate is not None and without.estimate is not None
    assert plan.estimate.memory.reserved_bytes > without.estimate.memory.reserved_bytes
    assert plan.estimate.first_memory == without.estimate.memory, "calibration learns from the closed form"


def test_only_what_nearly_fills_the_gpu_is_traced_where_that_is_asked(tmp_path: Path) -> None:
    asked: list[Request] = []
    tracing = Tracing(larger_by(1.15, asked), from_share=0.8)
    planned(tmp_path, "h100-80gb:1", tracing, "train.micro_batch_size=1")
    assert not asked
    planned(tmp_path, "h100-80gb:1", tracing)
    assert asked


def test_the_layout_of_an_earlier_attempt_is_kept_untraced(tmp_path: Path) -> None:
    asked: list[Request] = []
    first = planned(tmp_path, "h100-80gb:1", None)
    again = planned(tmp_path, "h100-80gb:1", Tracing(larger_by(1.15, asked)), keep=first.layout)
    assert again.layout == first.layout and not asked


def test_where_nothing_can_be_traced_the_closed_form_stands_and_says_so(tmp_path: Path) -> None:
    def refuses(request: Request, gpu: GpuSpec | None) -> Memory:
        raise UserError("zero2 cannot be traced", problems=["DeepSpeed's engine needs a GPU"])

    without, plan = (planned(tmp_path, "h100-80gb:2", tracing) for tracing in (None, Tracing(refuses)))
    assert plan.layout == without.layout
    assert all("not traced: zero2 cannot be traced; DeepSpeed's engine needs a GPU" in trace for trace in plan.traces)
    assert plan.traces


def test_parts_of_different_size_are_not_traced(tmp_path: Path) -> None:
    asked: list[Request] = []
    plan = planned(tmp_path, "a100-80gb:1,v100-32gb:1", Tracing(larger_by(1.0, asked)))
    assert plan.layout.rank_samples and not asked
    assert "not traced: the ranks have parts of different size" in plan.traces[0]


def test_the_trace_and_the_closed_form_agree_on_what_is_allocated() -> None:
    request = dataclasses.replace(STEP, evaluation_batch_size=12)
    traced, closed = traced_memory(request), memory(anatomy(read_config(SMALL)), request)
    assert traced.allocated_bytes == pytest.approx(closed.allocated_bytes, rel=0.02)
    assert sum(traced.parts_bytes.values()) == traced.allocated_bytes
    assert traced.device_bytes - traced.reserved_bytes == sum(traced.outside_bytes.values())
    assert traced.evaluation_bytes == pytest.approx(closed.evaluation_bytes, rel=0.02)
    assert traced.evaluation_reserved_bytes is not None
    assert traced.evaluation_reserved_bytes >= traced.reserved_bytes >= traced.allocated_bytes


def test_why_a_step_cannot_be_traced_is_said() -> None:
    with pytest.raises(UserError, match="zero3 cannot be traced: DeepSpeed's engine needs a GPU"):
        traced_memory(dataclasses.replace(STEP, strategy="zero3", world_size=2))
    with pytest.raises(UserError, match="config"):
        traced_memory(dataclasses.replace(STEP, config=SMALL | {"model_type": "no such"}))


def test_the_command_prints_what_was_traced(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SMALL | {"architectures": ["LlamaForCausalLM"]}))
    job = {"name": "small", "model": {"name": str(model)}, "data": {"path": "train.jsonl", "max_length": 512}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job | {"train": {"global_batch_size": 8}}))
    command = [sys.executable, "-m", "trainwright", "plan", "job.yaml", "--gpus", "rtx-3060-12gb:1", "--trace"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert ": traced, " in done.stdout and " (closed form " in done.stdout
    slurm = subprocess.run([*command[:5], "--slurm", "--trace"], capture_output=True, text=True, cwd=tmp_path)
    assert slurm.returncode == ExitCode.USAGE and "--trace" in slurm.stderr


def test_train_traces_a_step_that_nearly_fills_the_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As on a machine with that GPU; what is taken fits by the trace."""
    job = {"name": "full", "model": {"name": "Qwen/Qwen2.5-0.5B-Instruct"}, "method": {"type": "full"}}
    job |= {"output_dir": str(tmp_path), "data": {"path": "train.jsonl", "max_length": 512}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job | {"train": {"global_batch_size": 64}}))
    inventory = parse_inventory("rtx-3060-12gb:1,host=64gib")
    loaded = load_job(str(tmp_path / "job.yaml"), ())
    _, plan = plan_on(loaded.job, {"data.path"}, inventory, inventory.devices, may_leave_idle=True)
    assert "Tracing a step of this qwen2 model" in capsys.readouterr().err
    taken = f"{plan.layout.micro_batch_size} x {plan.layout.gradient_accumulation_steps}"
    assert any(taken in trace and "needs" not in trace for trace in plan.traces)


def test_harm_04_a_plan_of_a_release_before_a_field_is_taken_again(tmp_path: Path) -> None:
    """plan.json without the field that a later release added: the run goes on as it was, not with a plan of its own."""
    job = {"name": "old", "model": {"name": "Qwen/Qwen2.5-0.5B-Instruct"}, "output_dir": str(tmp_path)}
    job |= {"data": {"path": "train.jsonl", "max_length": 512}, "train": {"global_batch_size": 64}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    inventory = parse_inventory("a100-80gb:2,host=128gib")
    loaded = load_job(str(tmp_path / "job.yaml"), ())

    def plan_now() -> Plan:
        return plan_on(loaded.job, {"data.path"}, inventory, inventory.devices, may_leave_idle=False)[1]

    first = plan_now()
    other = next(c.layout for c in first.ranked if c.layout != first.layout and c.why_not is None)
    stored = dataclasses.asdict(other)
    assert not stored.pop("sync_each_micro_batch")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "plan.json").write_text(json.dumps({"layout": stored}))
    assert plan_now().layout == other
    (tmp_path / "old" / "plan.json").write_text(json.dumps({"layout": stored | {"of_a_later_release": 1}}))
    assert plan_now().layout == first.layout
