"""Results on disk: names and keys of the guide, kills, restarts with other numbers of workers, doubles."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scoring_worker import answered

from trainwright.errors import UserError
from trainwright.evaluate.documents import Heading, StrategyResults, comparison_document, run_document, table
from trainwright.evaluate.mdp import PRESETS
from trainwright.evaluate.metrics import Record, by_difficulty, compare, metrics
from trainwright.evaluate.policy_names import strategy
from trainwright.evaluate.results import Lines, results_path, write_results

GUIDE = PRESETS["guide"]
QUESTIONS = [f"q-{number:02}" for number in range(23)]
HEADING = Heading("2025-01-01T00:00:00+00:00", "Qwen/Qwen2.5-7B-Instruct", "data_parallel", (0, 1), "mixed", 42)


def work(results: Path, shares: list[list[str]], *, kill_after: int = 0) -> None:
    """Answer questions in one process each; kill each after `kill_after` questions, if that is not 0."""
    command = [sys.executable, str(Path(__file__).with_name("scoring_worker.py")), str(results)]
    workers = [
        subprocess.Popen([*command, f"worker-{rank}", str(kill_after), *share], stdout=subprocess.PIPE, text=True)
        for rank, share in enumerate(shares)
    ]
    for worker in workers:
        with worker:
            assert worker.stdout is not None
            if kill_after:
                assert worker.stdout.readline() == "hangs\n"
                worker.kill()
        assert worker.returncode == (-9 if kill_after else 0)


def test_killed_runs_go_on_with_other_numbers_of_workers_to_the_same_figures(tmp_path: Path) -> None:
    """Issue 6, done-when 5: 2, then 1, then 3 workers with kills; 23 questions scored once, figures equal to 1e-12."""
    results = tmp_path / "model_mixed_23q.json"
    lines = Lines(results)
    for workers, kill_after in ((2, 3), (1, 4), (3, 0)):
        lines.begin({"model": "m", "seed": 42})
        still_open = [question for _, question in lines.open_keys(["random"], QUESTIONS)]
        assert len(still_open) == {2: 23, 1: 17, 3: 13}[workers]
        work(results, [still_open[rank::workers] for rank in range(workers)], kill_after=kill_after)
    assert lines.open_keys(["random"], QUESTIONS) == []
    found = lines.collect().of("random", QUESTIONS)
    whole = [answered(question) for question in QUESTIONS]
    assert len(found) == 23
    assert [json.loads(json.dumps(record)) for record in whole] == found
    assert metrics(found) == metrics(whole)
    assert by_difficulty(found) == by_difficulty(whole)
    assert metrics(list(reversed(found))) == metrics(whole), "whatever order the questions ended in"


def test_a_line_that_a_kill_cut_short_is_answered_again(tmp_path: Path) -> None:
    """S3-26, E01: the torn line costs one question, not the file."""
    lines = Lines(tmp_path / "r.json")
    lines.begin({})
    for question in QUESTIONS[:3]:
        lines.append("worker-0", answered(question))
    path = lines.folder / "worker-0.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    assert [question for _, question in lines.open_keys(["random"], QUESTIONS[:3])] == [QUESTIONS[2]]
    lines.append("worker-0", answered(QUESTIONS[2]))
    assert lines.open_keys(["random"], QUESTIONS[:3]) == []


def test_a_question_that_two_workers_answered_counts_once(tmp_path: Path) -> None:
    """Issue 6, files: the first answer wins, whatever the file is called, and the double is told."""
    lines = Lines(tmp_path / "r.json")
    lines.begin({})
    first, second = answered("q-01"), {**answered("q-01"), "predicted": 4}
    lines.append("worker-9", first)
    lines.append("worker-0", second)
    collected = lines.collect()
    assert collected.doubles == (("random", "q-01"),)
    assert [record["predicted"] for record in collected.of("random", ["q-01"])] == [first["predicted"]]


def test_lines_of_another_evaluation_are_not_mixed_in(tmp_path: Path) -> None:
    """Issue 6, files: the same file name with another seed is refused, with what differs and the ways out."""
    Lines(tmp_path / "r.json").begin({"seed": 42, "model": "m"})
    Lines(tmp_path / "r.json").begin({"seed": 42, "model": "m"})
    with pytest.raises(UserError) as refusal:
        Lines(tmp_path / "r.json").begin({"seed": 43, "model": "m"})
    assert refusal.value.problems == ("seed was 42, and is 43",)


def test_results_lie_where_the_guide_says() -> None:
    """S3-25."""
    model = "Qwen/Qwen2.5-7B-Instruct"
    one = [strategy("mdp", GUIDE)]
    two = [*one, strategy("fixed:3", GUIDE)]
    assert results_path(model, "easy", 10, one) == Path("results/multi_gpu/Qwen2.5-7B-Instruct_easy_10q.json")
    assert results_path(model, "medium", 100, two) == Path(
        "results/multi_gpu_comparison/Qwen2.5-7B-Instruct_medium_100q_mdp_vs_fixed_k3.json"
    )
    assert results_path("outputs/m/", "easy", 5, one).name == "m_easy_5q.json"


def records(name: str, right: int, cost: float) -> list[Record]:
    """Return lines of 100 questions, the first `right` of them answered right, the next three not at all."""
    return [
        {
            **answered(f"q-{number:02}"),
            "strategy": name,
            "is_correct": number < right,
            "unparsable": right <= number < right + 3,
            "total_cost": cost,
            "iterations": 4,
        }
        for number in range(100)
    ]


def outcomes() -> list[StrategyResults]:
    return [
        StrategyResults(strategy("mdp", GUIDE), records("mdp", 76, 0.525)),
        StrategyResults(strategy("fixed:3", GUIDE), records("fixed:3", 62, 0.35)),
    ]


def test_a_run_file_has_the_keys_of_the_guide(tmp_path: Path) -> None:
    """S3-26, T-23: the guide's keys first; what other libraries count in is converted; the file is whole."""

    class Counted:
        def item(self) -> float:
            return 0.25

    path = tmp_path / "results" / "multi_gpu" / "r.json"
    outcome = outcomes()[0]
    write_results(
        path, run_document(HEADING, StrategyResults(outcome.strategy, [{**outcome.records[0], "seconds": None}]))
    )
    document = json.loads(path.read_text())
    assert list(document)[:7] == ["timestamp", "model", "gpu_mode", "gpu_ids", "config", "metrics", "results"]
    assert document["config"] == {"n_questions": 1, "difficulty": "mixed", "seed": 42}
    assert list(document["metrics"])[:3] == ["accuracy", "avg_cost", "avg_iterations"]
    write_results(path, {"metrics": {"accuracy": Counted()}})
    assert json.loads(path.read_text()) == {"metrics": {"accuracy": 0.25}}
    with pytest.raises(TypeError):
        write_results(path, {"metrics": object()})
    assert json.loads(path.read_text()) == {"metrics": {"accuracy": 0.25}}, "the old file or the new one"


def test_a_comparison_file_has_the_keys_of_the_guide() -> None:
    """S3-27; further strategies and the paired tests come after."""
    document = comparison_document(HEADING, outcomes())
    assert list(document)[:8] == [
        "timestamp", "model", "gpu_mode", "gpu_ids", "config", "mdp_strategy", "fixed_strategy", "improvement",
    ]  # fmt: skip
    assert document["config"] == {"n_questions": 100, "difficulty": "mixed", "seed": 42, "fixed_k": 3}
    assert document["mdp_strategy"]["accuracy"] == 0.76
    assert len(document["fixed_strategy"]["results"]) == 100
    assert document["improvement"] == pytest.approx({"accuracy": 0.14, "cost": 0.175})
    more = [*outcomes(), StrategyResults(strategy("fixed:1", GUIDE), records("fixed:1", 60, 0.15))]
    assert {"fixed_k3_strategy", "fixed_k1_strategy"} <= set(comparison_document(HEADING, more))


def test_the_table_reads_as_the_guides_with_its_uncertainty() -> None:
    """S3-27, T-20: Strategy, Accuracy, Avg Cost, Avg Iterations, an Improvement row; unparsable in its own column."""
    lines = table(outcomes(), seed=1).splitlines()
    assert lines[0] == "COMPARISON RESULTS"
    assert re.split(r" {2,}", lines[1])[:5] == ["Strategy", "Accuracy", "Avg Cost", "Avg Iterations", "Unparsable"]
    assert lines[3].split() == ["mdp", "76.0%", "(76/100)", "0.525", "4.00", "3", "66.8%", "-", "83.3%"]
    assert lines[6].split() == ["Improvement", "+14.0%", "+0.175", "+0.00"]
    assert "McNemar p = 0.000122" in lines[7]
    assert table(outcomes(), seed=1).isascii()


def test_strategies_are_compared_question_by_question() -> None:
    """Issue 6, scoring: the pairs decide, in whatever order the lines come."""
    first, second = records("mdp", 76, 0.525), records("fixed:3", 62, 0.35)
    found = compare(first, list(reversed(second)), seed=0)
    assert (found.only_first_correct, found.only_second_correct) == (14, 0)
    assert found.accuracy.is_clear and found.accuracy.mean == pytest.approx(0.14)
    assert found.cost.low == found.cost.high == pytest.approx(0.175)
