"""`trainwright demo` as a newcomer runs it: from nothing to a model that answers, with a stop and a resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from trainwright.demo.data import held_out_questions
from trainwright.runs.records import read
from trainwright.runs.writing import read_json

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TRAINWRIGHT = [sys.executable, "-m", "trainwright"]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TRAINWRIGHT, *map(str, arguments)], capture_output=True, text=True, timeout=500)


def exact_match(rows: list[dict[str, Any]]) -> float:
    return sum(row["answer"] == row["right_answer"] for row in rows) / len(rows)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes that have the folder on their command line."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if any(str(folder) in part for part in process.info["cmdline"] or ())
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


@dataclass(frozen=True)
class Demo:
    """A demo that ran to its end: its folder, and what it said."""

    folder: Path
    stdout: str
    stderr: str

    @property
    def run_dir(self) -> Path:
        return self.folder / "demo"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """Offline, two gloo processes; exit 0 means at least 0.8 exact match on facts that were never trained on."""
    folder = tmp_path_factory.mktemp("demo") / "a folder"
    made = run("demo", "--output-dir", folder, "--seed", "7")
    assert made.returncode == 0, made.stderr
    return Demo(folder, made.stdout, made.stderr)


def test_the_model_answers_after_a_stop_and_a_resume(demo: Demo) -> None:
    """Every figure that it prints is that of its answers, and its model is one that transformers loads."""
    folder, run_dir = demo.folder, demo.run_dir
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    with_story = [row for row in answers if row["story"] is not None]
    without = [row for row in answers if row["story"] is None]
    assert len(with_story) == len(without) == 200
    assert exact_match(with_story) >= 0.9
    assert exact_match(without) <= 0.02
    figures = [f"{exact_match(with_story):.3f}", f"{exact_match(without):.3f}"]
    assert [line.split()[-1] for line in demo.stdout.splitlines() if line.startswith("exact match")] == figures
    assert demo.stdout.count("\nQuestion: ") == 3
    assert "What to try next" in demo.stderr

    events = [event for event in read(run_dir / "events.jsonl") if event["event"] not in ("saved", "measured")]
    assert [(event["event"], event["attempt"]) for event in events] == [
        ("started", 1),
        ("stopped", 1),
        ("started", 2),
        ("finished", 2),
    ]
    steps = [event["step"] for event in events]
    assert steps[0] == 0 < steps[1] == steps[2] < steps[3]
    assert {event["backend"] for event in events if event["event"] == "started"} == {"gloo"}
    assert {event["world_size"] for event in events if event["event"] == "started"} == {"2"}
    assert [record["step"] for record in read(run_dir / "metrics.jsonl")] == list(range(1, steps[3] + 1))

    assert_plain_transformers_answers(run_dir / "final_model")
    for command in (["config", "show", folder / "demo.yaml"], ["train", folder / "demo-lora.yaml", "--dry-run"]):
        tried = run(*command)
        assert tried.returncode == 0, tried.stderr
    assert run("train", folder / "demo.yaml").stdout.split() == str(run_dir / "final_model").split()
    assert not processes_of(folder)


@pytest.mark.long
def test_retrieval_is_what_the_model_answers_by_and_knowing_when_to_stop_pays(demo: Demo, tmp_path: Path) -> None:
    """Issue 6, T-19, S3-21, S3-43: near nothing without, more with each retrieval, the MDP above fixed:3 for less."""
    command = [sys.executable, str(BENCHMARKS / "retrieval_pays.py"), "--json", "--villages", "70"]
    where = ["--model", str(demo.run_dir / "final_model"), "--folder", str(tmp_path)]
    evaluated = subprocess.run([*command, *where], capture_output=True, text=True, timeout=500)
    assert evaluated.returncode == 0, evaluated.stderr
    found = json.loads(evaluated.stdout)

    def accuracy(policy: str) -> float:
        return float(found[f"{policy}_strategy"]["accuracy"])

    assert accuracy("no_retrieval") <= 0.05
    assert accuracy("no_retrieval") < accuracy("fixed_k1") < accuracy("fixed_k3") < accuracy("fixed_k5")
    assert found["process_source"] == "estimated"
    against = next(pair for pair in found["comparisons"] if (pair["first"], pair["second"]) == ("mdp", "fixed:3"))
    assert against["accuracy"]["low"] > 0, "more answers right than fixed:3, outside the paired interval"
    assert against["cost"]["mean"] <= 0, "and no dearer"


def assert_plain_transformers_answers(model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
    right = 0
    questions = held_out_questions(1_000, 20, facts=2)
    for question in questions:
        asked = [{"role": "user", "content": question.prompt(with_story=True)}]
        prompt = tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_tensors="pt", return_dict=True, return_token_type_ids=False
        )
        tokens = model.generate(**prompt, max_new_tokens=10, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        right += tokenizer.decode(tokens, skip_special_tokens=True).strip() == question.answer
    assert right >= 18


@pytest.mark.long
def test_ctrl_c_leaves_nothing_behind_and_a_second_demo_starts_anew(tmp_path: Path) -> None:
    """Also: the old run of the folder is kept aside, and its steps are not taken for those of the new one."""
    run_dir = tmp_path / "demo"
    first = interrupted_demo(tmp_path, lambda: any(read(run_dir / "metrics.jsonl")))
    assert "Stopped. To go on with the training:" in first
    former = read_json(run_dir / "run.json")["run_id"]
    stopped_at = max(record["step"] for record in read(run_dir / "metrics.jsonl"))
    assert (run_dir / f"checkpoint-{stopped_at}").is_dir()

    def second_has_begun() -> bool:
        return read_json(run_dir / "run.json")["run_id"] != former and any(read(run_dir / "metrics.jsonl"))

    second = interrupted_demo(tmp_path, second_has_begun)
    assert "SIGTERM to process" not in second, "the demo took the old run's steps for the new one's"
    assert next(read(run_dir / "events.jsonl"))["step"] == 0
    assert read_json(tmp_path / "demo.old-1" / "run.json")["run_id"] == former


def interrupted_demo(folder: Path, begun: Callable[[], bool]) -> str:
    """Press Ctrl+C once the training has begun; return what the demo said, after it and all its processes are gone."""
    demo = subprocess.Popen(
        [*TRAINWRIGHT, "demo", "--output-dir", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline_s = time.monotonic() + 200
    while not begun():
        assert demo.poll() is None, demo.communicate()[0]
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    # As a terminal does: to the whole foreground group.
    os.killpg(demo.pid, signal.SIGINT)
    said, _ = demo.communicate(timeout=100)
    assert demo.returncode == 75, said
    assert not processes_of(folder)
    return said
