"""`trainwright report`: what was asked, decided, predicted and measured, of whole and of broken runs."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from written_runs import BEGAN_S, GIB, WrittenRun, document, trainwright

from trainwright.errors import ExitCode
from trainwright.reports.curves import MOST_STRETCHES
from trainwright.reports.page import render
from trainwright.reports.run_report import read_report
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import append, read

FAILURES = Path(__file__).parents[1] / "data" / "failures" / "real"
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[2J\x07\u202e\"'&"


def told(folder: RunFolder) -> dict[str, Any]:
    """The report's document of one run."""
    return json.loads(json.dumps(read_report(folder).to_json()))


def compared(report: dict[str, Any], what: str, rank: int | None = None) -> dict[str, Any]:
    (row,) = [row for row in report["compared"] if row["what"].startswith(what) and row["rank"] == rank]
    return dict(row)


class Page(HTMLParser):
    """Every element of a page with its attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_a_real_run_is_told_as_its_files_have_it(real_run: Path) -> None:
    """Issue 7, report: the command as a user gives it, by the run's name; figures are those of the files."""
    done = trainwright("report", "tiny", "--output-dir", real_run.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(real_run / "report.html")
    (report,) = document(real_run)["runs"]
    steps = [record for record in read(real_run / "metrics.jsonl") if record["kind"] == "train"]
    assert report["measured"]["median_step_s"] == median(record["step_s"] for record in steps[1:])
    assert report["summary"]["state"] == "finished" and report["summary"]["exit_code"] == 0
    assert (report["summary"]["step"], report["summary"]["total_steps"]) == (8, 8)
    assert report["summary"]["loss"] == steps[-1]["loss"]
    loss = next(plot for plot in report["plots"] if plot["name"] == "loss")["series"][0]
    assert [point[2] for point in loss["points"]] == [record["loss"] for record in steps]
    assert report["measured"]["steps_per_epoch"] == 6
    choices = json.loads((real_run / "plan.json").read_text())["choices"]
    assert {one["key"]: (one["value"], one["reason"]) for one in report["decided"]} == {
        key: (choice["value"], choice["reason"]) for key, choice in choices.items()
    }
    (measured,) = [event for event in read(real_run / "events.jsonl") if event["event"] == "measured"]
    assert compared(report, "host memory", 0)["measured"] == measured["resident_bytes"]
    attempt = json.loads((real_run / "logs" / "attempt_1" / "start.json").read_text())
    ended = next(event for event in read(real_run / "events.jsonl") if event["event"] == "finished")
    assert report["summary"]["duration_s"] == pytest.approx(ended["time_s"] - attempt["time_s"])
    assert report["sections_s"]["0"]["forward"] > 0 and "optimizer" in report["sections_s"]["0"]
    page = (real_run / "report.html").read_text()
    assert "about 40 min" in page and "not measured here" in page
    assert f"{steps[-1]['loss']:.4f}" in page
    assert "no GPU of the run was sampled" in page and report["measured"]["gpu_peak_bytes"] is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_harm_14_gpus_of_other_programs_are_not_the_runs(tmp_path: Path, device: str) -> None:
    """The sampler sees every GPU of a node; the report tells of those that the run's ranks were on."""
    run = WrittenRun(tmp_path, ranks=2)
    run.begin()
    run.train(1, 4)
    run.sample(3)
    plan = json.loads(run.folder.plan_json.read_text())
    plan["layout"]["device"] = device
    run.folder.plan_json.write_text(json.dumps(plan))
    lines = [json.loads(line) for line in run.folder.system_jsonl.read_text().splitlines()]
    for line in lines:
        stranger = line["gpus"][0] | {"index": 7, "uuid": "GPU-stranger", "memory_used_bytes": 39 * 2**30}
        line["gpus"].append(stranger)
    run.folder.system_jsonl.write_text("".join(json.dumps(line) + "\n" for line in lines))
    measured = read_report(run.folder).measured
    if device == "cpu":
        assert measured.gpu_peak_bytes is None and measured.gpu_utilization_pct is None
    else:
        assert measured.gpu_peak_bytes == 21 * 2**30


def test_predictions_stand_beside_what_was_measured(tmp_path: Path) -> None:
    """Issue 7, prediction against measurement, each marked; memory by rank, the step, the run."""
    run = WrittenRun.whole(tmp_path)
    report = told(run.folder)
    memory = compared(report, "memory in nvidia-smi", 1)
    assert (memory["predicted"], memory["measured"]) == (12 * GIB, 13.5 * GIB)
    assert memory["ratio"] == pytest.approx(1.125) and memory["kind"] == "estimate"
    step = compared(report, "time of a step")
    assert (step["predicted"], step["low"], step["high"], step["measured"]) == (0.4, 0.3, 0.6, 0.5)
    assert step["kind"] == "calibrated (3 runs)"
    assert compared(report, "time of the run")["measured"] == pytest.approx(100.0)
    assert compared(report, "host memory", 0)["predicted"] == 3 * GIB
    page = render([read_report(run.folder)])
    assert "12.00 GiB, estimate" in page and "13.50 GiB, measured" in page
    assert "0.4 s, calibrated (3 runs)" in page and "0.5 s, measured" in page


def test_a_run_that_was_killed_is_measured_by_its_samples(tmp_path: Path) -> None:
    """No word of a rank's own: the highest that the samples saw, and it says so."""
    run = WrittenRun(tmp_path)
    run.begin()
    run.train(1, 40)
    run.sample(10, peak_at=4)
    run.end("failed", rank=1, exit_code=-9, text="")
    report = told(run.folder)
    memory = compared(report, "memory in nvidia-smi", 0)
    assert (memory["measured"], memory["source"]) == (30 * GIB, "system.jsonl")
    assert compared(report, "time of the run")["measured"] is None
    assert report["summary"]["meaning"] == "rank 1 was ended by SIGKILL"
    assert report["measured"]["gpu_peak_pct"] == pytest.approx(100 * 31 / 40)
    assert "rank 1 failed (exit code -9)" in [incident["what"] for incident in report["incidents"]]


def test_a_reading_that_is_missing_is_not_available_and_never_zero(tmp_path: Path) -> None:
    """House rule of every view: null in the document, n/a on the page."""
    run = WrittenRun.whole(tmp_path)
    report = told(run.folder)
    assert not [plot for plot in report["plots"] if plot["name"] in ("gpu_temperature_c", "grad_norm")]
    empty = WrittenRun(tmp_path, name="empty")
    (report_of_nothing,) = document(empty.folder.path)["runs"]
    assert set(report_of_nothing["measured"].values()) == {None}
    assert report_of_nothing["summary"]["state"] == "preparing"
    assert "no process works on it" in report_of_nothing["summary"]["meaning"]
    page = Page(render([read_report(empty.folder)]))
    assert "metrics.jsonl has no step: loss and pace are not available" in page.text
    figures = [text for text in page.text if re.fullmatch(r"0(\.0+)?( \S+)?", text.strip())]
    assert figures == ["0"], "the number of attempts is the only zero"


def test_what_happened_is_told_in_order(tmp_path: Path) -> None:
    """Issue 7, incidents: attempts, memory, shares, failures, resumes, alerts."""
    run = WrittenRun(tmp_path)
    run.begin()
    run.train(1, 60, loss_at={50: 99.0})
    run.sample(10)
    append(run.folder.events_jsonl, {"event": "balanced", "step": 30, "reason": "rank 0 is 1.4 x as fast"})
    run.end("failed", rank=0, exit_code=77, text="error: out of memory in training", at_s=BEGAN_S + 60)
    choice = {"train.micro_batch_size": {"value": 4, "reason": "half of 8"}}
    append(run.folder.events_jsonl, {"event": "less memory", "attempt": 1, "choices": choice})
    run.begin(step=40, from_checkpoint="/there/checkpoint-40", at_s=BEGAN_S + 70)
    run.train(41, 100, attempt=2, loss_at={70: None})
    run.sample(10, attempt=2, at_s=BEGAN_S + 70)
    run.end(attempt=2, step=100, at_s=BEGAN_S + 170)
    alert = {
        "rule": "temperature",
        "subject": "GPU 0",
        "severity": "warning",
        "what": "GPU 0 has 91 °C",
        "advice": "fan",
    }
    for state, time_s in (("fired", 10.0), ("cleared", 30.0), ("fired", 50.0), ("cleared", 55.0)):
        at_s = BEGAN_S + time_s
        append(run.folder.alerts_of(0), {"state": state, "time_s": at_s, "since_s": at_s, "node": "node-1", **alert})
    report = told(run.folder)
    assert [incident["what"] for incident in report["incidents"]] == [
        "the run began",
        "the ranks' shares changed",
        "rank 0 failed (exit code 77)",
        "memory ran out: the layout changed to one that needs less",
        "attempt 2 resumed from checkpoint-40",
        "the run finished",
        "the loss was not finite at step 70",
        "20 steps were done again after a resume; the second time counts",
        "alert: GPU 0 has 91 °C",
    ]
    assert report["incidents"][3]["lines"] == ["train.micro_batch_size = 4  (half of 8)"]
    assert report["incidents"][-1]["lines"] == ["2 times, 25 s in all", "fan"]
    assert report["summary"]["duration_s"] == pytest.approx(160.0), "the time between attempts is no work"
    loss = next(plot for plot in report["plots"] if plot["name"] == "loss")["series"][0]
    assert max(point[3] for point in loss["points"]) < 99, "step 50 was done again, and better"
    assert [point[0] for point in loss["points"]] == [step for step in range(1, 101) if step != 70]


def test_broken_files_are_named_and_the_rest_is_told(tmp_path: Path) -> None:
    """Unfinished, failed and corrupt runs work; a record that a kill cut short costs only itself."""
    run = WrittenRun.whole(tmp_path)
    run.folder.plan_json.write_text('{"layout": ')
    run.folder.run_json.write_text('{"run_id": 7}')
    for path in (run.folder.metrics_jsonl, run.folder.system_jsonl, run.folder.events_jsonl):
        with path.open("a") as file:
            file.write('{"kind":"train","step":"many","loss":[]}\n[1,2]\n{"time_s":true,"gpus":7}\n{"kind":"tra')
    report = told(run.folder)
    assert report["summary"]["step"] == 100 and report["summary"]["state"] == "finished"
    assert report["measured"]["gpu_peak_bytes"] == 21 * GIB
    assert any(line.startswith("plan.json cannot be read") for line in report["missing"])
    assert any(line.startswith("run.json names no run") for line in report["missing"])
    assert report["decided"] == [] and compared(report, "time of a step")["predicted"] is None
    assert "plan.json cannot be read" in render([read_report(run.folder)])

    failed = WrittenRun(tmp_path, name="failed")
    failed.folder.plan_json.write_text('{"layout": {"ranks": "two"}, "devices": 3, "choices": []}')
    failed.folder.resolved_json.write_text('{"model": 1, "train": null}')
    failed.begin()
    failed.end("failed", rank=0, exit_code=1, text="ModuleNotFoundError: No module named 'flash_attn'")
    report = told(failed.folder)
    assert report["finding"]["cause"] == "missing-module" and report["summary"]["model"] is None
    assert render([read_report(failed.folder)])


@pytest.mark.parametrize("name", sorted(path.name for path in FAILURES.glob("run-*")))
def test_runs_that_really_failed_are_told_with_doctors_cause(name: str, tmp_path: Path) -> None:
    """The finding is that of `trainwright doctor RUN`; a run that did not fail has none."""
    folder = tmp_path / "run"
    shutil.copytree(FAILURES / name / "run", folder)
    report = told(RunFolder(folder))
    failed = any(event["event"] == "failed" for event in read(folder / "events.jsonl"))
    assert (report["summary"]["state"] == "failed") == failed == (report["finding"] is not None)
    page = render([read_report(RunFolder(folder))])
    assert page.count("<section") == 1
    if failed:
        assert report["finding"]["evidence"] and report["finding"]["fixes"] and "<h3>Why</h3>" in page


def test_text_of_others_is_inert_wherever_it_stands(tmp_path: Path) -> None:
    """X06: names, errors, reasons and log lines are text and nothing else, in the page and in the document."""
    run = WrittenRun(tmp_path, name="<b>&\"'name", claims={HOSTILE: HOSTILE}, job={"description": HOSTILE})
    plan = json.loads(run.folder.plan_json.read_text())
    plan["choices"][HOSTILE] = {"value": HOSTILE, "reason": HOSTILE}
    plan["warnings"] = [HOSTILE]
    plan["estimate"]["time_kind"] = HOSTILE
    run.folder.plan_json.write_text(json.dumps(plan))
    run.begin(from_checkpoint=f"/x/{HOSTILE}")
    run.train(1, 3)
    run.sample(2)
    run.folder.rank_log(1, 0).write_text(f"RuntimeError: {HOSTILE}\n")
    run.end("failed", rank=0, exit_code=1, text=f"Traceback:\n  {HOSTILE}\nRuntimeError: {HOSTILE}")
    alert = {"state": "fired", "time_s": BEGAN_S, "rule": HOSTILE, "subject": "x", "what": HOSTILE, "advice": HOSTILE}
    append(run.folder.alerts_of(0), alert)
    samples = run.folder.system_jsonl.read_text()
    run.folder.system_jsonl.write_text(samples.replace('"node-1"', json.dumps(HOSTILE)))
    text = render([read_report(run.folder), read_report(run.folder)])
    page = Page(text)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "img", "iframe", "object", "embed", "link", "base", "form", "foreignobject", "b"}
    assert not [
        name for _, attributes in page.elements for name in attributes if name.startswith("on") or name == "style"
    ]
    addresses = [attributes[name] for _, attributes in page.elements for name in ("href", "src") if name in attributes]
    assert addresses and all(address is not None and re.fullmatch(r"#run-\d+", address) for address in addresses)
    assert all(character.isprintable() or character == "\n" for character in text)
    assert sum("<script>alert(1)</script>" in part for part in page.text) > 10, "it is all there, as text"
    policy = next(a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a)
    assert re.fullmatch(
        r"default-src 'none'; style-src 'sha256-[\w+/]+='; base-uri 'none'; form-action 'none'", str(policy)
    )
    done = trainwright("report", run.folder.path, "--json")
    assert done.returncode == 0 and "\x1b" not in done.stdout and json.loads(done.stdout)


def test_a_long_run_makes_a_page_of_bounded_size_with_its_peaks(tmp_path: Path) -> None:
    """Done-when 5: 8 ranks and many samples; one step and one sample stand out, and are seen."""
    run = WrittenRun(tmp_path, ranks=8)
    run.begin()
    run.train(1, 20_000, loss_at={12_345: 7.5})
    run.sample(1_500, peak_at=1_111)
    run.end(step=20_000)
    report = read_report(run.folder)
    plots = {plot.name: plot for plot in report.plots}
    assert all(len(series.stretches) <= MOST_STRETCHES for plot in report.plots for series in plot.series)
    assert plots["loss"].series[0].high == 7.5
    (gpus,) = plots["gpu_memory_gib"].series
    assert gpus.name == "all" and (gpus.low, gpus.high) == (20.0, 37.0)
    assert len(render([report])) < 400_000


def test_the_page_goes_where_it_is_asked_to(tmp_path: Path) -> None:
    run, other = WrittenRun.whole(tmp_path, name="one"), WrittenRun.whole(tmp_path, name="other")
    done = trainwright("report", run.folder.path, other.folder.path)
    assert done.stdout.strip() == str(tmp_path / "report.html"), done.stderr
    out = tmp_path / "mine.html"
    done = trainwright("report", run.folder.path, "--out", out, "--json")
    assert out.read_text().startswith("<!doctype html>") and json.loads(done.stdout)["schema_version"] == 1
    assert not run.folder.report_html.exists()
    done = trainwright("report", run.folder.path, "--out", tmp_path / "nowhere" / "a.html")
    assert done.returncode == ExitCode.USAGE and "there is no folder" in done.stderr
    done = trainwright("report", tmp_path / "onee")
    assert done.returncode == ExitCode.MISSING and "did you mean" in done.stderr
