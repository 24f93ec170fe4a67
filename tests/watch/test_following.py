"""Reading and bounding files that grow while they are read."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from trainwright.watch.json_lines import Follower, evenly, newest
from trainwright.watch.sampler import SampleFile
from trainwright.watch.samples import GpuSample, HostSample, Sample


def sample(number: int) -> Sample:
    return Sample(time_s=float(number), node="node", host=HostSample(), gpus=(GpuSample(index=0),))


def test_a_long_run_stays_within_its_bound_and_loses_no_new_sample(tmp_path: Path) -> None:
    """Issue 7, samples: bounded by thinning the old."""
    path, limit_bytes, count = tmp_path / "system.jsonl", 200_000, 3000
    file = SampleFile(path, limit_bytes=limit_bytes)
    for number in range(count):
        file.add(sample(number))
        assert path.stat().st_size <= limit_bytes + 2000
    times = [json.loads(line)["time_s"] for line in path.read_text().splitlines()]
    assert times[0] == 0, "the first one stays: counters are compared with it"
    assert times == sorted(set(times))
    whole_tail = len(times) // 4 * 2 // 3
    assert times[-whole_tail:] == [float(number) for number in range(count - whole_tail, count)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert max(gaps[: len(gaps) // 10]) > max(gaps[-whole_tail:]), "the oldest are the thinnest"


def test_a_sample_reads_back_as_it_was_and_a_missing_reading_stays_missing(tmp_path: Path) -> None:
    written = Sample(
        time_s=1.5,
        node="n",
        attempt=2,
        host=HostSample(cpu_pct=0.0, cores_pct=(0.0, 1.5)),
        gpus=(GpuSample(index=0, utilization_pct=0, throttle_reasons=()), GpuSample(index=1, lost=True)),
    )
    SampleFile(tmp_path / "system.jsonl").add(written)
    (text,) = (tmp_path / "system.jsonl").read_text().splitlines()
    assert Sample.from_json(json.loads(text)) == written
    assert json.loads(text)["gpus"][0]["temperature_c"] is None
    assert json.loads(text)["gpus"][0]["utilization_pct"] == 0


def test_a_sample_of_a_later_version_can_be_read() -> None:
    later = sample(1).to_json() | {"fields_to_come": 1}
    later["gpus"][0]["more"] = 2
    assert Sample.from_json(later).gpus[0].index == 0


def test_a_follower_gives_each_record_once_whole_and_starts_again_with_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    assert list(follower.new()) == []
    path.write_text('{"a":1}\n{"a":2}\n{"a"')
    assert list(follower.new()) == [{"a": 1}, {"a": 2}]
    assert list(follower.new()) == []
    with path.open("a") as file:
        file.write(':3}\nnot json\n[1]\n{"a":4}\n')
    assert list(follower.new()) == [{"a": 3}, {"a": 4}]
    (tmp_path / "other").write_text('{"a":9}\n')
    (tmp_path / "other").replace(path)
    assert list(follower.new()) == [{"a": 9}]


def test_an_even_choice_of_a_long_file_has_its_ends_and_costs_what_it_gives(tmp_path: Path) -> None:
    path, count = tmp_path / "metrics.jsonl", 40_000
    path.write_text("".join(json.dumps({"step": step, "text": "x" * 40}) + "\n" for step in range(count)))
    steps = [record["step"] for record in evenly(path, 100)]
    assert steps[0] == 0 and steps[-1] == count - 1
    assert len(steps) <= 100
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    assert max(gaps) < 2 * count / 100 and min(gaps) > 0
    found = newest(path)
    assert found is not None and found["step"] == count - 1


def test_an_even_choice_of_a_short_file_is_not_longer_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert evenly(path, 10) == [] and newest(path) is None
    path.write_text('{"step":1}\n{"step":2}\n')
    assert evenly(path, 10) == [{"step": 1}, {"step": 2}]
