"""`plan --slurm` on a real cluster, and on what Slurm 24.11 wrote about the same one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from recorded import VERSIONS, recorded_cluster, recorded_waits
from slurm_bed import Node, SlurmBed

from trainwright.errors import ExitCode, UserError
from trainwright.hardware.slurm.cluster import Cluster
from trainwright.job.loading import load_job
from trainwright.launch.slurm.planning import MOST_ASKED
from trainwright.launch.slurm.waiting import past_waits, record_wait, told_wait
from trainwright.plan.estimates import Amount
from trainwright.plan.slurm.planned import Ask, PlannedRequest, planned_requests
from trainwright.plan.slurm.ranking import rank
from trainwright.plan.slurm.shapes import GpuShape, shapes
from trainwright.plan.slurm.slurm_request import SlurmRequest, slurm_time
from trainwright.plan.slurm.wait import PastWait, expected_wait
from trainwright.plan.tuned import LEVELS, MeasuredMicroBatch, Tuned, setting_of
from trainwright.plan.wish import Wish

JOB = ("preset:paper_r64", "model.name=Qwen/Qwen2.5-7B-Instruct")
PLAN = ("plan", *JOB, "--slurm", "--samples", "1000")
CLUSTER = (
    Node("a100-4", {"a100": 4}, cpus=32, memory_mib=256000, features=("a100_80gb",)),
    Node("a100-2", {"a100": 2}, cpus=16, memory_mib=128000, features=("a100_80gb",)),
    Node("v100-4", {"v100": 4}, cpus=32, memory_mib=256000, features=("v100_32gb",)),
    Node("mix-1", {"a100": 2, "v100": 2}, cpus=32, memory_mib=256000, features=("a100_80gb", "v100_32gb")),
)
PARTITIONS = "PartitionName=gpu Nodes=ALL Default=YES MaxTime=2-00:00:00 DefaultTime=00:10:00 State=UP"


@pytest.fixture(scope="module")
def busy(slurm_programs: None) -> Iterator[SlurmBed]:
    """Four A100 that are taken for ten minutes, two that are free, four free V100, a free node of both."""
    with SlurmBed(CLUSTER, PARTITIONS) as bed:
        script = "#!/bin/bash\n#SBATCH -o /dev/null --mem=1000\nsleep 3600\n"
        job = bed.sbatch(script, "-w", "a100-4", "--gres=gpu:a100:4", "-t", "10")
        bed.wait_job(job, ("RUNNING",))
        yield bed


@pytest.fixture(scope="module")
def planned(busy: SlurmBed) -> dict[str, Any]:
    """The JSON document of `plan --slurm`."""
    return document_of(busy, *PLAN)


def document_of(bed: SlurmBed, *arguments: str) -> dict[str, Any]:
    done = bed.trainwright(*arguments, "--json")
    assert done.returncode == ExitCode.DONE, done.stderr
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document


def by_gres(document: dict[str, Any], nodes: int = 1) -> dict[str, dict[str, Any]]:
    """Return the ranked requests by what they ask of each node."""
    found = {}
    for entry in document["requests"]:
        request = entry["request"]
        if request["nodes"] == nodes:
            found[f"{request['gpu_type'] or 'any'}:{request['gpus_per_node']}"] = entry
    return found


def test_requests_are_ranked_by_wait_and_run_together(planned: dict[str, Any]) -> None:
    """Done-when 1: two free A100 beat four that are busy, where the run is shorter than the wait, and V100."""
    finishes = [entry["now_finish_s"] for entry in planned["requests"]]
    assert all(later >= sooner - 60 for sooner, later in itertools.pairwise(finishes))
    for entry in planned["requests"]:
        assert entry["now_finish_s"] == pytest.approx(entry["now_wait_s"] + entry["run"]["run_s"])
    on_one = by_gres(planned)
    assert on_one["a100:2"]["now_wait_s"] < 60
    assert 300 < on_one["a100:4"]["now_wait_s"] <= 660
    assert on_one["a100:4"]["run"]["run_s"] < on_one["a100:2"]["run"]["run_s"]
    assert "a100-4" in on_one["a100:4"]["now_nodes"]
    assert on_one["v100:4"]["now_wait_s"] < 60


def test_a_longer_run_waits_for_the_faster_gpus(busy: SlurmBed) -> None:
    """Ten minutes of wait are nothing to a run of days: four A100 come before two, and before four V100."""
    long = [word if word != "1000" else "100000" for word in PLAN]
    order = [name for name in by_gres(document_of(busy, *long)) if name in ("a100:4", "a100:2", "v100:4")]
    assert order[0] == "a100:4"


def test_a_request_of_any_type_is_counted_with_the_slowest_it_may_bring(planned: dict[str, Any]) -> None:
    """S0-22, S0-32: four GPUs of any type may be A100, V100 or both."""
    on_one = by_gres(planned)
    flexible = on_one["any:4"]
    for gpus in ("4 x NVIDIA A100", "2 x NVIDIA A100 SXM 80 GB + 2 x NVIDIA V100", "4 x NVIDIA V100"):
        assert gpus in flexible["gpus"]
    assert flexible["run"]["run_s"] >= on_one["v100:4"]["run"]["run_s"]
    assert flexible["fastest_run_s"] == pytest.approx(on_one["a100:4"]["run"]["run_s"])
    assert "--gres=gpu:4" in flexible["request"]["options"]


def test_the_four_strategies_have_this_clusters_figures_and_the_guides_claims(busy: SlurmBed) -> None:
    """S0-19 to S0-23, read by a stranger: each row with its reason, claims marked as claims."""
    done = busy.trainwright(*PLAN)
    assert done.returncode == ExitCode.DONE, done.stderr
    text = done.stdout
    for strategy, gres in (("quick start", "a100:2"), ("balanced", "a100:3"), ("fastest", "a100:4"), ("flexible", "4")):
        line = next(line for line in text.splitlines() if line.startswith(f"  {strategy}: "))
        assert f"--gres=gpu:{gres}, wait" in line
        assert "finished in" in line
    assert text.count("the guide claims:") == 4
    assert "the guide's rule: queue no problem: 4x A100; want to start fast: 2x A100" in text
    reasons = text.split("Why in this order\n")[1].split("\n\n")[0].splitlines()
    assert len(reasons) == text.split("STRATEGY")[1].split("\n\n")[0].count("gpu:")
    assert all("starts " in reason for reason in reasons)
    assert "sbatch --partition=gpu --nodes=" in text


def test_json_is_stable_and_few_questions_are_put_to_the_controller(busy: SlurmBed, planned: dict[str, Any]) -> None:
    """What is planned is the same each time; waits, and so the order, are of the moment.

    Each `sbatch --test-only` takes a job id: a plan takes no more than its cap, and submits nothing.
    """
    before = next_job_id(busy)
    again = document_of(busy, *PLAN)
    assert next_job_id(busy) - before - 1 <= MOST_ASKED
    assert not busy.run("squeue", "-h", "-t", "PENDING").stdout
    assert planned["schema_version"] == 1
    assert planned["now_asked_at"]
    assert without_now(again) == without_now(planned)


def next_job_id(bed: SlurmBed) -> int:
    job = bed.run("sbatch", "--parsable", "--hold", "--wrap=true", cwd=bed.root).stdout.strip()
    bed.run("scancel", job)
    return int(job)


def test_the_request_is_one_that_slurm_takes_and_starts(busy: SlurmBed, planned: dict[str, Any]) -> None:
    options = by_gres(planned)["a100:2"]["request"]["options"]
    job = busy.run("sbatch", "--parsable", "-o", "/dev/null", *options, "--wrap=true", cwd=busy.root).stdout.strip()
    assert busy.wait_job(job)["JobState"] == "COMPLETED"


def test_earlier_waits_correct_what_slurm_says(busy: SlurmBed, tmp_path: Path) -> None:
    """Jobs of this shape started at once, whatever Slurm said: the plan says so, and ranks by it."""
    home = tmp_path / "data"
    for number in range(3):
        wait = PastWait(
            job_id=str(number), cluster="bed", partition="gpu", gpu_type="a100", gpus=4, told_s=600.0, waited_s=30.0
        )
        assert record_wait(wait, home / "trainwright") is None
    before = busy.env["XDG_DATA_HOME"]
    busy.env["XDG_DATA_HOME"] = str(home)
    try:
        entry = by_gres(document_of(busy, *PLAN))["a100:4"]
    finally:
        busy.env["XDG_DATA_HOME"] = before
    assert entry["now_wait_s"] <= 0.3 * entry["now_told_wait_s"]
    assert "3 such jobs of yours waited" in entry["now_wait_reason"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--slurm", "--gpus", "a100-80gb:2"), "--gpus do not go with"),
        (("--slurm", "--partition", "nope"), "no partition `nope`"),
        (("--slurm", "--gpu-type", "h100=h100"), "write TYPE=MODEL"),
        (("--partition", "gpu"), "add --slurm"),
        (("--slurm", "resources.gpus=[0,1]"), "resources.gpus=2"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(busy: SlurmBed, flags: tuple[str, ...], words: str) -> None:
    done = busy.trainwright("plan", *JOB, *flags)
    assert done.returncode == ExitCode.USAGE
    assert words in done.stderr


def test_what_slurm_refuses_is_told_in_its_words() -> None:
    text = "sbatch: error: Batch job submission failed: x\nallocation failure: Invalid account\x1b[2J\n"
    wait = told_wait(text, 1, datetime.now(), request(), "bed", ())
    assert wait.refused == "Batch job submission failed: x; Invalid account?[2J"


# -- without a cluster: what was recorded, and pure functions


@pytest.mark.parametrize("version", VERSIONS)
def test_the_recorded_outputs_give_the_same_ranking(version: str) -> None:
    """Done-when 1 on both versions: the same cluster, read from text, with the start times that Slurm told then."""
    cluster, job = recorded_cluster(version), load_job(JOB[0], list(JOB[1:]))
    given = {key for key, origin in job.origins.items() if origin.kind != "default"}
    ask = Ask(wish=Wish(amount=Amount(1000)))
    asked_at, answers = recorded_waits(version)
    wanted = [shape for shape in shapes(cluster, {}) if (gres_of(shape), shape.nodes) in answers]
    found, _ = planned_requests(job.job, given, wanted, ask)
    told = [
        (made, told_wait(*answers[made.request.gres, made.request.nodes], asked_at, made.request, cluster.name, ()))
        for made in found
    ]
    ranked = rank(told)
    names = [str(each.planned.shape) for each in ranked]
    assert names.index("gpu:a100:2") < names.index("gpu:a100:4") < names.index("gpu:a100:3")
    assert names.index("gpu:a100:2") < names.index("gpu:v100:4") < names.index("gpu:4")
    waits = {str(each.planned.shape): each.wait.wait_s for each in ranked}
    assert waits["gpu:a100:2"] is not None and waits["gpu:a100:2"] < 60
    assert waits["gpu:a100:4"] is not None and 300 < waits["gpu:a100:4"] < 660


def gres_of(shape: GpuShape) -> str:
    return ":".join(filter(None, ("gpu", shape.gpu_type, str(shape.gpus_per_node))))


def test_time_limit_memory_and_cores_follow_from_the_estimates() -> None:
    made = planned_on_recorded("gpu:a100:2", samples=1000)
    assert made.run is not None
    assert made.run.high_s / 60 < made.request.time_limit_min < made.run.high_s / 60 + 20
    assert made.plan.estimate is not None and made.plan.estimate.host is not None
    assert made.request.memory_mib * 2**20 >= made.plan.estimate.host.node_bytes
    assert made.request.cpus == 16
    assert made.jobs == 1


def test_a_run_beyond_the_partitions_limit_asks_for_the_limit_and_names_the_chain() -> None:
    made = planned_on_recorded("gpu:v100:1", samples=1_000_000)
    assert made.request.time_limit_min == 2 * 24 * 60
    assert made.jobs > 1
    assert f"--chain {made.jobs}" in made.choices["time"].reason


def test_what_tune_measured_on_such_gpus_counts_for_a_request_too() -> None:
    """Issue 5: its answers are used by later plans, also for a cluster that holds GPUs of the same model."""
    left_open = ("train.micro_batch_size=auto", "train.gradient_accumulation_steps=auto")
    untuned = planned_on_recorded("gpu:a100:2", 1000, left_open)
    largest = untuned.plan.layout.micro_batch_size
    assert largest > 1
    answer = Tuned(
        date="2026-11-22T01:02:03+00:00",
        setting=setting_of(untuned.job, untuned.plan.layout, untuned.plan.devices),
        global_batch_size=untuned.plan.layout.global_batch_size,
        points=(MeasuredMicroBatch(micro_batch_size=1, step_s=1.0),),
        levels=dict.fromkeys(LEVELS, 1),
        level="recommended",
        too_large=2,
        why="CUDA out of memory",
        evaluated=None,
        probes=1,
        steps=10,
    )
    tuned = planned_on_recorded("gpu:a100:2", 1000, left_open, answer)
    assert tuned.plan.layout.micro_batch_size == 1
    assert tuned.plan.layout.global_batch_size == untuned.plan.layout.global_batch_size
    assert tuned.run is not None and untuned.run is not None
    assert tuned.run.run_s > untuned.run.run_s


def test_models_of_one_type_are_told_apart_by_a_feature_of_the_nodes(hardware_cluster: Cluster) -> None:
    """One gres type for cards of 40 and 80 GB: each is asked for with the feature that only its nodes have."""
    found = {(shape.gpu_type, shape.constraint, shape.may_get[0][0]) for shape in shapes(hardware_cluster, {}, "gpu")}
    assert ("a100", "gpu80", ("a100-80gb",) * 2) in found
    assert ("a100", "gpu40", ("a100-40gb",) * 2) in found
    assert (None, "a40", ("a40",) * 2) in found
    assert all(shape.partition.name == "gpu" for shape in shapes(hardware_cluster, {}, "gpu"))


def test_nodes_out_of_service_and_closed_partitions_are_not_asked_for(hardware_cluster: Cluster) -> None:
    found = shapes(hardware_cluster, {})
    assert not any(shape.gpu_type == "h100" for shape in found)
    assert not any(shape.partition.name == "closed" for shape in found)


def request(**changed: Any) -> SlurmRequest:
    """Return two A100 for an hour, with changes."""
    given: dict[str, Any] = {
        "partition": "gpu",
        "nodes": 1,
        "gpus_per_node": 2,
        "gpu_type": "a100",
        "time_limit_min": 60,
        "memory_mib": 1024,
        "cpus": 8,
    }
    return SlurmRequest(**given | changed)


@pytest.mark.parametrize("value", ["a b", "$(touch x)", "x\n#SBATCH --wrap=y", "-p", "a;b", "\u202eabc", "a'b", "ж"])
@pytest.mark.parametrize("field", ["partition", "gpu_type", "account", "qos", "constraint"])
def test_names_that_slurm_does_not_have_are_refused(field: str, value: str) -> None:
    """S1-13, T-08: a value is literally an option of sbatch, and nothing else."""
    with pytest.raises(UserError, match="no such names"):
        request(**{field: value})


@pytest.mark.parametrize(("minutes", "text"), [(5, "00:05:00"), (61, "01:01:00"), (2885, "2-00:05:00")])
def test_time_limits_are_written_as_slurm_reads_them(minutes: int, text: str) -> None:
    assert slurm_time(minutes) == text


def test_a_wait_is_corrected_only_by_enough_waits_of_the_same_kind() -> None:
    def past(job: int, gpus: int = 2, waited_s: float = 3600.0) -> PastWait:
        return PastWait(
            job_id=str(job), cluster="c", partition="gpu", gpu_type="a100", gpus=gpus, told_s=60.0, waited_s=waited_s
        )

    few = expected_wait(request(), "c", 60.0, None, [past(1), past(2), past(3, gpus=4)])
    assert few.wait_s == 60.0
    enough = expected_wait(request(), "c", 60.0, None, [past(1), past(2), past(3)])
    assert enough.wait_s is not None and enough.wait_s > 3000
    assert "3 such jobs" in enough.reason
    assert expected_wait(request(), "other", 60.0, None, [past(1), past(2), past(3)]).wait_s == 60.0
    untold = expected_wait(request(), "c", None, None, [past(1), past(2), past(3)])
    assert untold.wait_s == 3600.0
    assert expected_wait(request(), "c", None, None, []).wait_s is None


def test_the_record_of_waits_survives_torn_and_foreign_lines(tmp_path: Path) -> None:
    wait = PastWait(job_id="7", cluster="c", partition="gpu", gpu_type=None, gpus=4, told_s=0.0, waited_s=9.5)
    assert record_wait(wait, tmp_path) is None
    with (tmp_path / "slurm_waits.jsonl").open("a") as file:
        file.write('{"job_id": "8", "cluster": "c", "partition": "gpu", "gpu_type": null, "gpus": 1, "told_s": "x"}\n')
        file.write('{"job_id": "9", "waited_s": NaN}\n{"job')
    assert past_waits(tmp_path) == (wait,)


def planned_on_recorded(name: str, samples: int, overrides: Sequence[str] = (), *tuned: Tuned) -> PlannedRequest:
    """Return what the job would ask for in one shape on the recorded cluster."""
    job = load_job(JOB[0], [*JOB[1:], *overrides])
    given = {key for key, origin in job.origins.items() if origin.kind != "default"}
    wanted = [shape for shape in shapes(recorded_cluster(VERSIONS[0]), {}) if str(shape) == name]
    ask = Ask(wish=Wish(amount=Amount(samples), tuned=tuned))
    ((made,), _) = planned_requests(job.job, given, wanted, ask)
    return made


def without_now(value: Any) -> Any:
    """Return plain data without what is marked as of now, and without the order that follows from it."""
    if isinstance(value, dict):
        return {key: without_now(item) for key, item in value.items() if not key.startswith("now_")}
    return sorted(map(without_now, value), key=str) if isinstance(value, list) else value
