"""Plans for a user's own script: what starts it, what it is told, and what an estimate of it can say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainwright.errors import UserError
from trainwright.estimate.script_request import ScriptRequest
from trainwright.hardware.inventory import parse_inventory
from trainwright.job.schema import Job
from trainwright.plan.choose import Plan, choose
from trainwright.plan.own_script import own_script


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job_of(*script: str, **sections: Any) -> Job:
    return Job.model_validate({"name": "a", "script": list(script), **sections})


def planned(job: Job, gpus: str = "a100-80gb:2") -> Plan:
    return choose(job, {"train.global_batch_size"}, parse_inventory(gpus).devices)[1]


@pytest.mark.parametrize(
    ("source", "launcher", "reason"),
    [
        ("from accelerate import Accelerator", "accelerate", "train.py imports accelerate"),
        ("from transformers import Trainer", "accelerate", "train.py imports transformers' Trainer"),
        ("def f():\n    import deepspeed", "deepspeed", "train.py imports deepspeed"),
        ("import torch.distributed as dist", "torchrun", "train.py imports torch.distributed"),
        ("from torch import distributed", "torchrun", "train.py imports torch.distributed"),
        ("import torch\n# import accelerate", "python", "train.py imports nothing that joins processes"),
        ("this is no Python", "python", "train.py imports nothing that joins processes"),
    ],
)
def test_the_launcher_follows_from_what_the_script_imports(
    place: Path, source: str, launcher: str, reason: str
) -> None:
    (place / "train.py").write_text(source)
    choice = own_script(job_of("python", "train.py")).launcher
    assert (choice.value, choice.reason[: len(reason)]) == (launcher, reason)


@pytest.mark.parametrize(
    ("script", "launcher", "command"),
    [
        (["accelerate", "launch", "train.py", "--x"], "accelerate", ("python", "train.py", "--x")),
        (["torchrun", "-m", "pkg.train"], "torchrun", ("python", "-m", "pkg.train")),
        (["deepspeed", "train.py"], "deepspeed", ("python", "train.py")),
        (["python", "-m", "torch.distributed.run", "train.py"], "torchrun", ("python", "train.py")),
        (["train.py", "--x"], "python", ("python", "train.py", "--x")),
        (["bash", "train.sh"], "python", ("bash", "train.sh")),
    ],
)
def test_a_launcher_in_the_command_is_taken_over(script: list[str], launcher: str, command: tuple[str, ...]) -> None:
    found = own_script(job_of(*script))
    assert (found.launcher.value, found.command) == (launcher, command)


def test_options_of_a_launcher_are_the_plans_and_refused() -> None:
    with pytest.raises(UserError, match="`--nproc-per-node=2` is an option of torchrun"):
        own_script(job_of("torchrun", "--nproc-per-node=2", "train.py"))
    with pytest.raises(UserError, match="launcher=deepspeed"):
        own_script(job_of("torchrun", "train.py", launcher="deepspeed"))


def test_without_a_model_nothing_is_estimated_and_a_trace_is_pointed_at(place: Path) -> None:
    (place / "train.py").write_text("import accelerate")
    plan = planned(job_of("python", "train.py", "{micro_batch_size}"))
    assert plan.estimate is None
    assert plan.no_estimate is not None and plan.no_estimate.startswith("the job names no model")
    request = json.loads(plan.no_estimate[plan.no_estimate.index("{") :])
    assert ScriptRequest.parse(request).world_size == 2


def test_with_a_model_it_is_estimated_as_the_built_in_trainer_and_that_is_said(place: Path) -> None:
    (place / "train.py").write_text("import accelerate")
    model = {"name": "Qwen/Qwen2.5-0.5B"}
    own = planned(job_of("python", "train.py", "{micro_batch_size}", model=model))
    built_in = planned(Job.model_validate({"name": "a", "model": model}))
    assert own.estimate is not None and built_in.estimate is not None
    assert own.estimate.peak_bytes == built_in.estimate.peak_bytes
    assert any("as the built-in trainer makes it" in warning for warning in own.warnings)


def test_a_script_of_one_process_gets_one_gpu_and_cannot_be_asked_for_more(place: Path) -> None:
    (place / "train.py").write_text("import torch")
    plan = planned(job_of("python", "train.py"))
    assert (plan.layout.ranks, plan.layout.strategy) == (1, "single")
    assert any(warning.startswith("1 of 2 GPUs is used") for warning in plan.warnings)
    with pytest.raises(UserError, match="the script is one process"):
        planned(job_of("python", "train.py", resources={"ranks": 2}))


def test_a_script_that_is_not_told_its_strategy_is_taken_as_ddp(place: Path) -> None:
    model = {"name": "Qwen/Qwen2.5-0.5B"}
    assert planned(job_of("torchrun", "t.py", model=model)).layout.strategy == "ddp"
    assert planned(job_of("torchrun", "t.py", model=model), "a100-80gb:1").layout.strategy == "single"
    assert planned(job_of("deepspeed", "t.py", model=model)).layout.strategy == "zero2"
    with pytest.raises(UserError, match="is not DeepSpeed's"):
        planned(job_of("deepspeed", "t.py", resources={"strategy": "ddp"}))


def test_what_a_script_is_not_told_is_said_and_what_the_job_lacks_is_refused(place: Path) -> None:
    plan = planned(job_of("torchrun", "t.py", "{micro_batch_size}", train={"global_batch_size": 64}))
    assert any("is not told of {gradient_accumulation_steps}=" in warning for warning in plan.warnings)
    with pytest.raises(UserError) as caught:
        planned(job_of("torchrun", "t.py", "{model}", "{data}"))
    assert len(caught.value.problems) == 2
