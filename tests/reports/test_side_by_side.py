"""Several runs side by side: the tables of the guides, as measured (S1-28, S2-24 to S2-28)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from written_runs import WrittenRun

from trainwright.reports.page import render
from trainwright.reports.run_report import read_report
from trainwright.reports.side_by_side import comparisons


def tables(*runs: WrittenRun) -> dict[str, dict[str, Any]]:
    """The comparisons of runs, by name."""
    found = [comparison.to_json() for comparison in comparisons([read_report(run.folder) for run in runs])]
    assert len({one["name"] for one in found}) == len(found)
    return {one["name"]: one for one in found}


def test_numbers_of_gpus_beside_the_guides_claims(tmp_path: Path) -> None:
    """S1-28, S1-29, U-11: throughput, speed-up, efficiency and what is lost are measured; the guide's are claims."""
    paces = {4: 3000.0, 1: 1000.0, 2: 1850.0, 3: 2500.0}
    runs = [
        WrittenRun.whole(tmp_path, name=f"on-{n}", ranks=n, tokens_per_s=pace, strategy="single" if n == 1 else "ddp")
        for n, pace in paces.items()
    ]
    table = tables(*runs)["gpus"]
    rows = {row["ranks"]: row for row in table["rows"]}
    assert list(rows) == [1, 2, 3, 4]
    assert [rows[n]["speed_up"] for n in rows] == pytest.approx([1.0, 1.85, 2.5, 3.0])
    assert [rows[n]["ideal"] for n in rows] == [1, 2, 3, 4]
    assert rows[4]["efficiency_pct"] == pytest.approx(75) and rows[4]["lost_pct"] == pytest.approx(25)
    assert [rows[n]["claim"] for n in rows] == [None, "1.8-1.9x, 5-10 % lost", None, "3.5-3.8x, 5-12 % lost"]
    assert table["marks"]["speed_up"] == "measured" and table["marks"]["claim"] == "claim"
    page = render([read_report(run.folder) for run in runs])
    assert 'data-comparison="gpus"' in page and "1.85x" in page and "<small>claim</small>" in page


def test_without_a_run_on_one_gpu_there_is_no_claim_to_compare_with(tmp_path: Path) -> None:
    runs = [WrittenRun.whole(tmp_path, name=f"on-{n}", ranks=n, tokens_per_s=900.0 * n) for n in (2, 4)]
    rows = tables(*runs)["gpus"]["rows"]
    assert [row["ideal"] for row in rows] == [1, 2] and [row["claim"] for row in rows] == [None, None]


def test_batch_sizes_with_memory_use_throughput_and_time(tmp_path: Path) -> None:
    """S2-24 to S2-28: what the guide claims for a level stands beside that level's own run."""
    claims = {"time per epoch": "about 20 min"}
    small = WrittenRun.whole(tmp_path, name="small", micro=1, tokens_per_s=500.0, step_s=2.0)
    large = WrittenRun.whole(tmp_path, name="large", micro=16, tokens_per_s=4000.0, claims=claims)
    table = tables(large, small)["batches"]
    first, second = table["rows"]
    assert (first["micro_batch_size"], second["micro_batch_size"]) == (1, 16)
    assert (first["global_batch_size"], second["global_batch_size"]) == (2, 32)
    assert second["gpu_peak_pct"] == pytest.approx(100 * 21 / 40)
    assert second["gpu_utilization_pct"] == pytest.approx(80.5)
    assert first["epoch_s"] == pytest.approx(200.0), "100 steps of 2 s"
    assert (first["claim"], second["claim"]) == (None, "time per epoch: about 20 min")


def test_strategies_on_the_same_devices(tmp_path: Path) -> None:
    runs = [WrittenRun.whole(tmp_path, name=name, strategy=name) for name in ("ddp", "fsdp2")]
    found = tables(*runs)
    assert [row["strategy"] for row in found["strategies"]["rows"]] == ["ddp", "fsdp2"]
    assert found.keys() == {"runs", "strategies"}, "they differ in nothing else"


def test_runs_of_other_models_are_listed_and_not_compared(tmp_path: Path) -> None:
    one = WrittenRun.whole(tmp_path, name="one", ranks=1)
    other = WrittenRun.whole(tmp_path, name="other", ranks=2, job={"model": {"name": "gpt2"}})
    assert tables(one, other).keys() == {"runs"}
    assert tables(one) == {}


def test_a_run_without_a_measurement_is_in_the_table_with_none(tmp_path: Path) -> None:
    whole, empty = WrittenRun.whole(tmp_path, name="whole", ranks=1), WrittenRun(tmp_path, name="empty", ranks=2)
    rows = tables(whole, empty)["gpus"]["rows"]
    assert [row["speed_up"] for row in rows] == [1.0, None]
    assert rows[1]["claim"] == "1.8-1.9x, 5-10 % lost"
