"""Cause told apart from collateral, fixes for the run at hand, and output that a terminal survives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainwright.doctor.after import diagnose
from trainwright.doctor.finding import HEALTHY, UNDETERMINED, Finding, diagnosis_lines
from trainwright.doctor.losses import Losses, course_of

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB "
    "of which 1.10 GiB is free. Including non-PyTorch memory, this process has 78.0 GiB memory in use. Of the "
    "allocated memory {allocated} GiB is allocated by PyTorch, and {unused} GiB is reserved by PyTorch but unallocated."
)
OLD_OOM = (
    "RuntimeError: CUDA out of memory. Tried to allocate 512.00 MiB (GPU 0; 23.70 GiB total capacity; {allocated} GiB "
    "already allocated; {free} GiB free; {reserved} GiB reserved in total by PyTorch)"
)
WATCHDOG = (
    "[rank{rank}]:[E ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600010 milliseconds\n"
)
SIGKILLED = "failed (exitcode: -9) local_rank: 1 (pid: 12) of binary: python\n"
LAYOUT = {
    "ranks": 1,
    "micro_batch_size": 8,
    "gradient_accumulation_steps": 8,
    "global_batch_size": 64,
    "eval_batch_size": 24,
    "gradient_checkpointing": False,
}


def explain(folder: Path, **logs: str) -> Finding:
    """Write logs and return what the doctor makes of them; `__` in a name stands for a dot."""
    folder.mkdir(exist_ok=True)
    for name, text in logs.items():
        (folder / name.replace("__", ".")).write_text(text)
    return diagnose([folder]).finding


def run_folder(folder: Path, **files: Any) -> Path:
    """Write what a run of ours leaves: lists as JSON Lines, dicts as JSON, text as rank 0's log."""
    attempt = folder / "logs" / "attempt_1"
    attempt.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"run_id": "0" * 32}))
    (folder / "plan.json").write_text(json.dumps({"layout": LAYOUT, "learning_rate": 3e-4}))
    job = {"train": {"learning_rate": 3e-4, "gradient_accumulation_steps": "auto"}, "resources": {}}
    (folder / "resolved.json").write_text(json.dumps(job))
    for name, content in files.items():
        if name == "log":
            (attempt / "rank_0.log").write_text(content)
        else:
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in content))
    return folder


def test_the_fix_is_a_command_with_this_runs_own_batch(tmp_path: Path) -> None:
    """S4-32: batch 4 x accumulation 16 keeps 64."""
    folder = run_folder(tmp_path / "run", log="step 1/9  epoch 0.1  loss 2.0\n" + OOM.format(allocated=77, unused=0.1))
    finding = diagnose([folder]).finding
    assert finding.cause == "device-oom/at-once"
    wanted = f"micro-batch 4 x 16 keeps 64: trainwright train {folder}/resolved.json train.micro_batch_size=4"
    assert finding.fixes[0] == wanted


@pytest.mark.parametrize(
    "log, cause",
    [
        (OOM.format(allocated=60, unused=17), "device-oom/fragmentation"),
        (
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n" + OOM.format(allocated=60, unused=17),
            "device-oom/at-once",
        ),
        ("{'loss': 2.0}\n" * 40 + OOM.format(allocated=77, unused=0.1), "device-oom/later"),
        (
            "$ nvidia-smi\n"
            + OOM.format(allocated=5, unused=0.1).replace(
                "this process has 78.0", "Process 77 has 70.00 GiB memory in use. this process has 6.0"
            ),
            "device-oom/other-process",
        ),
        (
            "Loading checkpoint shards:  89%|████ | 17/19 [00:48<00:05]\n"
            + OOM.format(allocated=77, unused=0.1).replace("this process has 78.0", "Process 77 has 78.05"),
            "device-oom/at-once",
        ),
        (OLD_OOM.format(allocated=11, reserved=21, free=1.0), "device-oom/fragmentation"),
        (OLD_OOM.format(allocated=21.5, reserved=22.1, free=0.1), "device-oom/at-once"),
        (OLD_OOM.format(allocated=5.2, reserved=5.3, free=0.1), "device-oom/other-process"),
    ],
)
def test_out_of_memory_is_told_by_its_figures(tmp_path: Path, log: str, cause: str) -> None:
    """M05: at once, later, fragmented (not advised where it is on already), or others' memory."""
    finding = explain(tmp_path / "logs", train__log=log)
    assert finding.cause == cause
    assert ("expandable_segments" in " ".join(finding.fixes)) == (cause == "device-oom/fragmentation")


def test_the_kernels_word_makes_a_kill_a_lack_of_memory_and_its_absence_does_not(tmp_path: Path) -> None:
    """M06, M08: the same exit code, with and without evidence."""
    assert explain(tmp_path / "a", train__log=SIGKILLED).cause == "killed-from-outside"
    kernel = "[1.2] Memory cgroup out of memory: Killed process 12 (python) total-vm:1kB\n"
    assert explain(tmp_path / "b", train__log=SIGKILLED, dmesg__txt=kernel).cause == "host-oom/kernel"
    failed = [
        {"event": "started", "attempt": 1},
        {"event": "failed", "attempt": 1, "rank": 1, "exit_code": -9, "text": ""},
    ]
    for rise, cause in ((0, "killed-from-outside"), (1, "host-oom/kernel")):
        samples = [{"host": {"oom_kill_total": 3}}, {"host": {"oom_kill_total": 3 + rise}}]
        folder = run_folder(tmp_path / f"run-{rise}", events=failed, system=samples, log="")
        assert diagnose([folder]).finding.cause == cause


def test_a_survivors_complaint_is_collateral_and_without_a_cause_nothing_is_named(tmp_path: Path) -> None:
    """G5: what the other rank did is only shown; where that is all there is, it is undetermined."""
    gone = "[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:4711\n"
    lines = ("Traceback (most recent call last):", '  File "task.py", line 3, in loss', "KeyError: 3")
    own = "".join(f"[rank1]: {line}\n" for line in lines)
    finding = explain(tmp_path / "both", train__log=gone + own)
    assert (finding.cause, finding.rank) == ("exception/key", 1)
    assert "task.py:3 in loss" in " ".join(finding.fixes)
    alone = diagnose([_written(tmp_path / "alone", gone)])
    assert alone.finding.cause == UNDETERMINED
    assert alone.finding.evidence[0].place == "train.log:1"
    assert alone.finding.fixes


def test_an_error_after_which_training_went_on_is_no_cause(tmp_path: Path) -> None:
    """A retry that succeeded, before a failure of another kind."""
    log = "OSError: [Errno 28] No space left on device\n" + "{'loss': 1.0}\n" * 9
    assert explain(tmp_path / "a", train__log=log).cause == UNDETERMINED
    finding = explain(tmp_path / "b", train__log=log + "Traceback (most recent call last):\nValueError: no\n")
    assert finding.cause == "exception"


def test_an_abort_by_the_watchdog_is_collateral_and_any_other_is_a_cause(tmp_path: Path) -> None:
    """G5: ranks that abort as they waited too long say nothing of why; one gap among them says whom they waited for."""
    abort = "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    waited = "".join(WATCHDOG.format(rank=rank) for rank in (1, 2, 3))
    finding = explain(tmp_path / "gap", train__log=waited + abort)
    assert (finding.cause, finding.rank) == ("rank-missing", 0)
    assert explain(tmp_path / "node", train__log=WATCHDOG.format(rank=9) + abort).cause == UNDETERMINED
    crashed = "double free or corruption (!prev)\n" + abort + "\n" * 9 + waited
    assert explain(tmp_path / "heap", train__log=crashed).cause == "abort/heap"
    assert explain(tmp_path / "alone", train__log=abort + "\n" * 9 + waited).cause == "abort"


def test_whom_the_others_waited_for_is_told_by_what_its_log_says(tmp_path: Path) -> None:
    """Out of batches, or in its data loader: one of two ranks times out, the log of the other has no error."""
    waited = WATCHDOG.format(rank=0)
    done = "epoch 0 done, loader exhausted after 463 batches\n"
    uneven = explain(tmp_path / "uneven", rank_0__log=waited, rank_1__log=done)
    assert (uneven.cause, uneven.rank) == ("uneven-data", 1)
    stack = 'it 3300 loss 1.192\nThread 0x7f:\n  File "dataloader.py", line 12 in _try_get_data\n'
    stuck = explain(tmp_path / "stuck", rank_0__log=waited, rank_1__log=stack)
    assert (stuck.cause, stuck.rank) == ("data-loader-stuck", 1)
    mesh = "RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] Connection refused, remote=[127.0.1.1]:40125\n"
    assert explain(tmp_path / "mesh", rank_1__log=mesh).cause == "network"


def test_what_a_library_raised_and_nobody_knows_is_undetermined_with_the_users_own_line(tmp_path: Path) -> None:
    """Done-when 1: rather no cause than a wrong one; an exception of the program itself stays one."""
    head = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 3, in <module>\n'
    inner = '  File "/v/lib/python3.11/site-packages/lib/a.py", line 9, in f\n'
    finding = explain(tmp_path / "library", train__log=head + inner + "RuntimeError: quux\n")
    assert finding.cause == UNDETERMINED
    assert "RuntimeError: quux" in finding.title
    assert any("train.py:3" in fix for fix in finding.fixes)
    assert explain(tmp_path / "refused", train__log=head + inner + "ValueError: quux\n").cause == "exception"
    assert explain(tmp_path / "own", train__log=head + "RuntimeError: quux\n").cause == "exception"


def test_a_step_that_srun_cancelled_follows_from_the_task_that_failed(tmp_path: Path) -> None:
    """Slurm cancels what is left; preempted and requeued to its end is well."""
    cancelled = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T01:00:00 ***\n"
    failed = "Traceback (most recent call last):\nOSError: [Errno 28] No space left on device\n"
    assert explain(tmp_path / "failed", slurm__out=failed + cancelled).cause == "disk-full"
    assert explain(tmp_path / "alone", slurm__out=cancelled).cause == "slurm/cancelled/step"
    preempted = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T01:00:00 DUE TO PREEMPTION ***\n"
    done = "{'train_runtime': 12.0, 'train_loss': 1.0}\n"
    assert explain(tmp_path / "requeued", slurm__out=preempted + done).cause == HEALTHY
    assert explain(tmp_path / "gone", slurm__out=preempted).cause == "slurm/preempted"


def test_torchruns_summary_names_the_rank_whose_traceback_has_none(tmp_path: Path) -> None:
    """One log of all ranks: the first that torchrun, or the spawning process, saw fail."""
    error = "Traceback (most recent call last):\nKeyError: 'x'\n"
    summary = "Root Cause (first observed failure):\n[0]:\n  host      : a\n  rank      : 3 (local_rank: 3)\n"
    assert explain(tmp_path / "torchrun", train__log=error + summary).rank == 3
    spawned = "-- Process 2 terminated with the following error:\n" + error
    assert explain(tmp_path / "spawn", train__log=spawned).rank == 2


@pytest.mark.parametrize(
    "before, rank",
    [
        ("[rank3]: ", 3),
        ("[1][default3]:", 3),
        ("[1,3]<stderr>:", 3),
        ("3: ", 3),
        ("(rank 3/16) ", 3),
        ("2025-05-19T07:02:31.002Z ERR   ", None),
        ("[worker-3] 2025-05-19T07:02:31Z ", None),
        ("2025-05-19T07:02:31.002123456+00:00 stderr F [rank3]: ", 3),
    ],
)
def test_what_launchers_and_collectors_write_before_a_line_hides_nothing(
    tmp_path: Path, before: str, rank: int | None
) -> None:
    """Of torchrun (with roles), mpirun, srun, fairseq, Kubernetes."""
    lines = (
        "Traceback (most recent call last):",
        '  File "/app/train.py", line 97, in main',
        "    labels[key]",
        "KeyError: 'answer'",
    )
    found = explain(tmp_path / "run", train__log="".join(f"{before}{line}\n" for line in lines))
    assert (found.cause, found.rank) == ("exception/key", rank)
    assert any("train.py:97" in evidence.text for evidence in found.evidence)


def test_the_kernels_pid_names_the_rank_and_a_killed_worker(tmp_path: Path) -> None:
    """M06: torchrun tells which rank had a pid; a container counts pids of its own."""
    kernel = "Memory cgroup out of memory: Killed process 881 (python) total-vm:39681324kB, anon-rss:16401012kB\n"
    summary = "  rank      : 5 (local_rank: 5)\n  exitcode  : -9 (pid: 881)\n"
    of_rank = explain(tmp_path / "rank", dmesg__txt=kernel, train__log=summary)
    assert (of_rank.cause, of_rank.rank) == ("host-oom/kernel", 5)
    worker = "[rank2]: RuntimeError: DataLoader worker (pid 17) is killed by signal: Killed. \n"
    of_worker = explain(tmp_path / "worker", dmesg__txt=kernel, train__log=worker)
    assert (of_worker.cause, of_worker.rank) == ("host-oom/worker", 2)
    of_both = explain(tmp_path / "both", dmesg__txt=kernel, train__log=worker + summary)
    assert (of_both.cause, of_both.rank) == ("host-oom/kernel", 5)


def test_a_process_that_ended_well_acquits_no_other(tmp_path: Path) -> None:
    """DeepSpeed's launcher tells of each rank; alone it says that the run came to its end."""
    steps = "".join(f"steps: {n} loss: {3 - n / 30:.3f}\n" for n in range(30))
    well = "[INFO] [launch.py:347:main] Process 4411 exits successfully.\n"
    assert explain(tmp_path / "well", train__log=steps + well).cause == HEALTHY
    failed = "Traceback (most recent call last):\n  File \"a.py\", line 3, in save\nKeyError: 'x'\n"
    assert explain(tmp_path / "failed", train__log=steps + failed + well).cause == "exception/key"


@pytest.mark.parametrize(
    "line, cause",
    [
        ("iter {n}  time: 0.50  data_time: 0.41  loss: {loss}", "data-starvation"),
        ("step {n} | loss {loss} | data_time 0.3 ms | step_time 5.9 ms | gpu_util 12%", "batch-too-small"),
        ("iter {n}: loss {loss}, time 11.4ms (data 0.1ms), mfu 0.18%", "batch-too-small"),
        (
            "loss: {loss} | fwd_microstep: 800.1 | bwd_microstep: 2000.0 | bwd_inner_microstep: 200.0 | "
            "bwd_allreduce_microstep: 1800.0 | step_microstep: 20.0",
            "communication-bound",
        ),
        ("iter {n}: loss {loss}, time 250.1ms (data 5 ms), mfu 38.2%", UNDETERMINED),
        ("it {n} | mel nan | kl nan", "loss-nan"),
        ("iteration {n}/ 300 | lm loss: NAN | grad norm: nan | number of nan iterations: 20 |", "loss-nan"),
    ],
)
def test_lines_of_progress_tell_what_slows_a_run(tmp_path: Path, line: str, cause: str) -> None:
    """S2-33: of programs whose lines nobody agreed on."""
    log = "".join(f"{line.format(n=n, loss=round(3 - n / 200, 3))}\n" for n in range(300))
    assert explain(tmp_path / "logs", train__log=log).cause == cause


def test_an_exception_that_python_ignored_is_no_cause_and_a_traceback_may_lack_its_beginning(tmp_path: Path) -> None:
    """What an object's end raises is only mentioned; a log that was cut begins anywhere."""
    end = "Traceback (most recent call last):\n  File \"a.py\", line 3, in __del__\nAttributeError: no 'x'\n"
    ignored = "Exception ignored in: <function A.__del__ at 0x7f>\n"
    assert explain(tmp_path / "ignored", train__log=ignored + end).cause == UNDETERMINED
    assert explain(tmp_path / "raised", train__log=end).cause == "exception/attribute"
    cut = "  File \"a.py\", line 3, in step\n    x.y\nKeyError: 'x'\n"
    assert explain(tmp_path / "cut", train__log=cut).cause == "exception/key"


def test_samples_tell_a_slow_run_apart(tmp_path: Path) -> None:
    """S2-33: data loading, communication, too small a batch, a slow card, heat."""

    def samples(
        data: float, communication: float, slow: float = 1.0, heat: tuple[str, ...] = ()
    ) -> list[dict[str, Any]]:
        def rank(number: int, factor: float) -> dict[str, Any]:
            parts = {"data": data, "forward": 10 * factor, "backward": 20 * factor, "communication": communication}
            return {"rank": number, "steps_total": 100, "sections_s_total": parts}

        gpu = {"index": 0, "utilization_pct": 30, "temperature_c": 91, "throttle_reasons": list(heat)}
        return [{"gpus": [gpu], "ranks": [rank(0, 1.0), rank(1, slow)]}] * 20

    finished = [{"event": "started"}, {"event": "finished"}]
    for name, records, cause in (
        ("data", samples(40, 1), "data-starvation"),
        ("links", samples(1, 60), "communication-bound"),
        ("batch", samples(1, 1), "batch-too-small"),
        ("rank", samples(1, 1, slow=2.0), "slow-rank"),
        ("heat", samples(1, 1, heat=("hw_thermal_slowdown",)), "gpu-throttled"),
    ):
        folder = run_folder(tmp_path / name, system=records, events=finished)
        assert diagnose([folder]).finding.cause == cause, name


def test_flight_recorders_and_stacks_name_the_missing_rank_and_where_it_stands(tmp_path: Path) -> None:
    """H01: three ranks wait in the fourth collective, one is in its data loader."""
    timed_out = "RuntimeError: Timed out waiting 8000ms for recv operation to complete\n"
    for rank in range(4):
        entries = [{"collective_seq_id": n, "profiling_name": "nccl:all_reduce"} for n in range(3 if rank == 2 else 4)]
        (tmp_path / f"fr_rank_{rank}.json").write_text(json.dumps({"entries": entries}))
    stack = (
        'Thread 0x00007f01 (most recent call first):\n  File "/home/u/data.py", line 8 in read\n'
        '  File "/home/u/train.py", line 19 in <module>\n'
    )
    (tmp_path / "stack_rank_2.txt").write_text(stack)
    finding = diagnose([_written(tmp_path, timed_out)]).finding
    assert (finding.cause, finding.rank) == ("rank-missing", 2)
    assert any("data.py:8 in read" in evidence.text for evidence in finding.evidence)


def test_what_a_log_holds_cannot_move_a_terminal(tmp_path: Path) -> None:
    """X06: escapes, carriage returns, bidi overrides in messages, file names and ranks' words."""
    hostile = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m"
    log = f'Traceback (most recent call last):\n  File "/x/{hostile}.py", line 1, in {hostile}\nValueError: {hostile}\n'
    folder = _written(tmp_path / "x", log + f"ModuleNotFoundError: No module named 'a{hostile}'\n")
    diagnosis = diagnose([folder])
    text = "\n".join(diagnosis_lines(diagnosis))
    assert all(character.isprintable() or character == "\n" for character in text)
    assert json.loads(json.dumps(diagnosis.to_json()))["schema_version"] == 1


def test_courses_of_losses() -> None:
    """S1-27: falling with noise is well; NaN, zeros, growth and swinging are told, and little data is not judged."""
    falling = [3 / (1 + step / 30) + (0.1 if step % 2 else 0) for step in range(200)]
    cases: list[tuple[list[float], str | None]] = [
        (falling, None),
        (falling[:5], None),
        (falling[:60] + [float("nan")] * 3, "loss-nan"),
        ([0.0] * 30, "loss-zero"),
        (falling[:60] + [2.0 + step / 5 for step in range(60)], "loss-divergence"),
        ([4.0 - step / 200 for step in range(60)] + [3.7 + step / 60 for step in range(60)], "loss-divergence"),
        ([3.7 + (0.3 if step % 2 else 0) + step / 1000 for step in range(120)], None),
        ([1.2 + (step % 2) for step in range(80)], "loss-oscillation"),
    ]
    for values, wanted in cases:
        losses = Losses()
        for number, value in enumerate(values):
            losses.add(value, f"log:{number}")
        found = course_of(losses)
        assert (found.cause if found else None) == wanted


def test_a_finished_run_is_well(tmp_path: Path) -> None:
    """No cause is made up."""
    metrics = [{"kind": "train", "attempt": 1, "loss": 2 - step / 100} for step in range(50)]
    folder = run_folder(tmp_path / "run", events=[{"event": "started"}, {"event": "finished"}], metrics=metrics)
    assert diagnose([folder]).finding.cause == HEALTHY


def _written(folder: Path, log: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "train.log").write_text(log)
    return folder
