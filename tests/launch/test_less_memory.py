"""Which layout a run goes on with after its memory ran out, and what is left when there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainwright.hardware.host import kernel_kills
from trainwright.job.loading import load_job
from trainwright.job.schema import Job
from trainwright.launch.failures import cause_of, read_failures
from trainwright.launch.less_memory import as_remembered, remedies, remember, smaller
from trainwright.plan.layout import Layout
from trainwright.runs.folder import RunFolder

TORCH = (
    "CUDA out of memory. Tried to allocate 1.25 GiB. GPU 0 has a total capacity of 23.64 GiB of which 705.00 MiB is "
    "free. Of the allocated memory 20.41 GiB is allocated by PyTorch, and 2.07 GiB is reserved by PyTorch but "
    "unallocated."
)


def job_with(tmp_path: Path, *overrides: str) -> Job:
    path = tmp_path / "job.yaml"
    path.write_text("name: a\nmodel: {name: some/model}\ndata: {path: data.jsonl, max_length: 512}\n")
    return load_job(str(path), overrides).job


def layout_with(**values: Any) -> Layout:
    defaults: dict[str, Any] = {
        "device": "cuda",
        "visible_devices": "0,1",
        "ranks": 2,
        "strategy": "ddp",
        "precision": "bf16",
        "offload": "none",
        "global_batch_size": 24,
        "micro_batch_size": 6,
        "gradient_accumulation_steps": 2,
        "eval_batch_size": 18,
        "gradient_checkpointing": False,
    }
    return Layout(**defaults | values)


def ways_down(job: Job, layout: Layout) -> list[tuple[Any, ...]]:
    """Return what a run goes through whose memory never suffices in training."""
    found = []
    change = smaller(job, layout, "training", "because")
    while change is not None:
        layout = change.layout
        found.append(
            (
                layout.micro_batch_size,
                layout.gradient_accumulation_steps,
                layout.gradient_checkpointing,
                layout.strategy,
                layout.offload,
            )
        )
        assert all(
            "because" in choice.reason or "as many as before" in choice.reason for choice in change.choices.values()
        )
        change = smaller(job, layout, "training", "because")
    return found


def test_the_batch_of_a_step_is_kept_all_the_way_down(tmp_path: Path) -> None:
    """M01, M04: half and half again, with as much more accumulation; then checkpointing, then sharing."""
    assert ways_down(job_with(tmp_path), layout_with()) == [
        (3, 4, False, "ddp", "none"),
        (1, 12, False, "ddp", "none"),
        (1, 12, True, "ddp", "none"),
        (1, 12, True, "zero3", "optimizer+parameters"),
    ]


@pytest.mark.parametrize(
    "overrides, last",
    [
        (["train.gradient_checkpointing=false", "resources.strategy=ddp"], (1, 12, False, "ddp", "none")),
        (["resources.strategy=fsdp2"], (1, 12, True, "fsdp2", "none")),
        (["train.optim=adafactor"], (1, 12, True, "ddp", "none")),
    ],
)
def test_what_the_job_says_is_kept(tmp_path: Path, overrides: list[str], last: tuple[Any, ...]) -> None:
    """M04: no checkpointing, strategy or offload against the user's word; Adafactor is not sharded."""
    job = job_with(tmp_path, *overrides)
    strategy = "ddp" if job.resources.strategy == "auto" else job.resources.strategy
    assert ways_down(job, layout_with(strategy=strategy))[-1] == last


def test_an_evaluation_that_is_too_large_takes_half_and_training_stays_as_it_was(tmp_path: Path) -> None:
    """S2-22: three times the micro-batch is only a first guess."""
    layout = layout_with()
    change = smaller(job_with(tmp_path), layout, "evaluation", "because")
    assert change is not None
    assert change.layout == replace(layout, eval_batch_size=9)
    assert change.lines == ["  eval.batch_size = 9  (half of 18: because)"]


def test_a_model_that_does_not_even_start_is_shared_at_once(tmp_path: Path) -> None:
    change = smaller(job_with(tmp_path), layout_with(), "starting", "because")
    assert change is not None
    assert (change.layout.strategy, change.layout.micro_batch_size) == ("zero3", 6)


def test_a_later_start_goes_on_from_what_was_learned_and_another_layout_is_left_alone(tmp_path: Path) -> None:
    """A layout that failed gives way to the one that followed it, over several steps; another one does not."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    job, asked = job_with(tmp_path), layout_with()
    layout = asked
    for attempt in (1, 2, 3):
        change = smaller(job, layout, "training", f"attempt {attempt}")
        assert change is not None
        remember(folder, attempt, layout, change)
        layout = change.layout
    found = as_remembered(folder, asked)
    assert found.layout == layout
    assert found.choices["train.micro_batch_size"].value == 1
    assert found.choices["train.micro_batch_size"].reason == "half of 3: attempt 2"
    other = layout_with(ranks=1, visible_devices="0", strategy="single", gradient_accumulation_steps=4)
    assert as_remembered(folder, other).layout == other
    assert as_remembered(folder, other).choices == {}


def test_three_remedies_are_commands_as_the_user_would_give_them(tmp_path: Path) -> None:
    """M04, M05: the job and its overrides quoted; what changes what is learned begins anew."""
    asked = ("my job.yaml", "train.seed=3")
    layout = layout_with(gradient_checkpointing=True, strategy="zero3", offload="optimizer+parameters")
    start = "trainwright train 'my job.yaml' train.seed=3"
    assert remedies(job_with(tmp_path), layout, TORCH, asked) == [
        f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True {start}",
        f"{start} method.type=lora --fresh",
        f"{start} data.max_length=256 --fresh",
    ]
    on_adapters = job_with(tmp_path, "method.type=qlora", "train.optim=adafactor")
    assert remedies(on_adapters, layout, "CUDA error: out of memory", ("{train}.yaml",)) == [
        "trainwright train '{train}.yaml' data.max_length=256 --fresh",
        "trainwright plan '{train}.yaml' --gpus h100:2",
        "trainwright gpus",
    ]


@pytest.mark.parametrize("code", [1, -6])
def test_a_library_that_ends_the_process_is_understood_from_the_log(tmp_path: Path, code: int) -> None:
    """M01: bitsandbytes leaves through exit() and NCCL's watchdog through abort(); no Python code came to speak."""
    (tmp_path / "rank_0.log").write_text("step 1/5\nConnection closed by peer\n")
    (tmp_path / "rank_1.log").write_text("step 1/5\nError out of memory at line 380 in file /src/csrc/ops.cu\n")
    cause = cause_of(read_failures(tmp_path, [-6, code], killed=()))
    assert (cause.rank, cause.out_of_memory_in) == (1, "training")


def test_a_rank_killed_from_outside_is_not_said_to_have_run_out(tmp_path: Path) -> None:
    """M08: also where a warning at the end of its log speaks of memory."""
    (tmp_path / "rank_0.log").write_text("warning: the sampler ran out of memory\n")
    cause = cause_of(read_failures(tmp_path, [-9], killed=()))
    assert cause.out_of_memory_in is None
    assert "memory" not in cause.describe()
    assert "the kernel had no host memory left for it" in replace(cause, killed_by_kernel=True).describe()


@pytest.mark.parametrize("version", ["v1", "v2", "none"])
def test_the_kernels_own_count_is_read_where_it_is(tmp_path: Path, version: str) -> None:
    """M06: that of this process's control group before the machine's, which counts other containers' kills too."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/vmstat").write_text("pgfault 5\noom_kill 7\n")
    lines = {"v1": "4:memory:/job/7\n1:cpu:/\n", "v2": "0::/job/7\n", "none": ""}
    (tmp_path / "proc/self/cgroup").write_text(lines[version])
    if version != "none":
        outer = tmp_path / ("sys/fs/cgroup/memory/job" if version == "v1" else "sys/fs/cgroup/job")
        name = "memory.oom_control" if version == "v1" else "memory.events"
        (outer / "7").mkdir(parents=True)
        (outer / name).write_text("low 0\noom_kill 5\n")
        (outer / "7" / name).write_text("under_oom 0\noom_kill 3\n")
    assert kernel_kills(tmp_path) == (7 if version == "none" else 3)


def test_harm_04_no_gradients_stay_whole_before_the_batch_is_cut(tmp_path: Path) -> None:
    """Under FSDP2; half the micro-batch of a step that had one only would carry whole gradients, which need more."""
    job = job_with(tmp_path, "resources.strategy=fsdp2")
    change = smaller(job, layout_with(strategy="fsdp2"), "training", "because")
    assert change is not None
    assert change.layout == replace(layout_with(strategy="fsdp2"), sync_each_micro_batch=True)
    assert list(change.choices) == ["train.sync_each_micro_batch"]
    alone = layout_with(strategy="fsdp2", micro_batch_size=12, gradient_accumulation_steps=1)
    change = smaller(job, alone, "training", "because")
    assert change is not None
    assert change.layout.micro_batch_size == 6 and change.layout.sync_each_micro_batch
    kept = smaller(
        job_with(tmp_path, "resources.strategy=fsdp2", "train.sync_each_micro_batch=false"),
        alone,
        "training",
        "because",
    )
    assert kept is not None and not kept.layout.sync_each_micro_batch
