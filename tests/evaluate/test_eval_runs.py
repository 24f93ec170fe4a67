"""Evaluations from the command to the results file: batches, retrieval, files, checks, and clear ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from evaluations import (
    DEADLINE_S,
    QUESTIONS,
    answered,
    close_gate,
    command,
    environment,
    held,
    results,
    run,
    start,
    write_benchmark,
)
from saved_models import save_model

from trainwright.errors import ExitCode, UserError
from trainwright.evaluate.claims import claims
from trainwright.evaluate.eval_checks import require, run_checks
from trainwright.evaluate.eval_config import load_evaluation
from trainwright.evaluate.mdp import PRESETS
from trainwright.evaluate.policy_names import strategy
from trainwright.evaluate.replicas import spread
from trainwright.hardware.inventory import parse_inventory

ORAN = Path(__file__).parents[1] / "data" / "oran_bench"


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    """Return a folder with a benchmark, its corpus and an evaluation file."""
    write_benchmark(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Return the folder of a comparison and what it printed."""
    folder = tmp_path_factory.mktemp("compared")
    write_benchmark(folder)
    (folder / "gate").mkdir()
    flags = ("eval.yaml", "batch_size=auto", "--compare", "fixed:1", "no-retrieval", "always-reason", "--json")
    done = run(folder, *flags, gate=folder / "gate")
    assert done.returncode == ExitCode.DONE, done.stderr
    return folder, done


def test_all_live_questions_are_one_call_of_the_engine_at_each_step(
    compared: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """Issue 6, engines: 69 questions of three policies, 64 of them open at once; never one question at a time."""
    sizes = [int(line.split()[1]) for line in (compared[0] / "gate" / "calls.txt").read_text().splitlines()]
    steps = max(record["num_reasons"] for record in results(compared[0])["always_reason_strategy"]["results"])
    assert sizes[0] == 64
    # Two policies are through after one reasoning; the third goes on for as long as its longest question does.
    assert len(sizes) <= steps + 1
    assert sum(sizes) == 2 * QUESTIONS + steps * QUESTIONS


def test_what_is_retrieved_reaches_the_model_and_is_recorded(
    compared: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """T-19, S3-26: the passage makes the answer right; without it the model guesses; sources are in the history."""
    document = results(compared[0])
    fixed, without = document["fixed_strategy"], document["no_retrieval_strategy"]
    assert fixed["accuracy"] == fixed["gold_retrieved"] == 1.0
    assert without["accuracy"] < 0.7
    assert without["gold_retrieved"] == 0.0
    assert 0 < without["unparsable"] < QUESTIONS
    assert document["improvement"]["accuracy"] == pytest.approx(1.0 - without["accuracy"])
    assert document["comparisons"][0]["accuracy"]["low"] > 0
    first = fixed["results"][0]
    retrieval, reasoning = first["history"]
    assert retrieval["retrieved_docs"] == [{"id": "p-00", "source": "corpus.jsonl:1"}]
    assert (retrieval["action"], retrieval["retrieval_success"]) == ("retrieve", True)
    assert reasoning["response"] and reasoning["confidence"] == 0.5
    assert (first["total_cost"], first["iterations"]) == (pytest.approx(0.15), 2)


def test_the_results_file_has_the_name_of_the_guide_and_json_tells_the_figures(
    compared: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """S3-25, S3-27, S3-47: baselines beside the accuracy; stdout is one document, without the single questions."""
    folder, done = compared
    [path] = (folder / "results").glob("*/*.json")
    names = "fixed_k1_vs_no_retrieval_vs_always_reason"
    assert path.relative_to(folder).as_posix() == (
        f"results/multi_gpu_comparison/reader-7B_mixed_{QUESTIONS}q_{names}.json"
    )
    said, stored = json.loads(done.stdout), json.loads(path.read_text())
    assert said["schema_version"] == 1
    assert said["results_file"] == path.relative_to(folder).as_posix()
    assert said["fixed_strategy"]["accuracy"] == stored["fixed_strategy"]["accuracy"]
    assert "results" not in said["fixed_strategy"]
    assert {row["difficulty"] for row in stored["baselines"]} == {"easy", "medium", "hard"}
    assert set(stored["fixed_strategy"]["by_difficulty"]) == {"easy", "medium", "hard"}
    assert stored["engine"] == ["engine: reader", "reads acme/reader-7B"]
    assert stored["process_source"] == "assumed"


def test_a_single_run_prints_the_table_and_what_was_decided(bench: Path) -> None:
    """S3-04, S3-25: the guide's own spelling of the flags; data on stdout, everything else on stderr."""
    flags = ("--n_questions", "5", "-d", "easy", "--gpu_mode", "single", "--model", "Qwen/Qwen2.5-7B-Instruct")
    done = run(bench, "eval.yaml", *flags, "policies=[fixed:1]")
    assert done.returncode == ExitCode.DONE, done.stderr
    assert done.stdout.startswith("RESULTS\nStrategy")
    assert "fixed:1   100.0% (5/5)" in done.stdout
    for words in ("gpu_mode = single", "bm25 over 23 passages", "check ok: environment", "answered 5/5", "measured: 5"):
        assert words in done.stderr, words
    document = results(bench)
    [path] = (bench / "results" / "multi_gpu").glob("*.json")
    assert path.name == "Qwen2.5-7B-Instruct_easy_5q.json"
    assert list(document)[:7] == ["timestamp", "model", "gpu_mode", "gpu_ids", "config", "metrics", "results"]
    assert (document["gpu_mode"], document["gpu_ids"]) == ("single", [])


def test_a_model_of_transformers_answers_the_guides_benchmark_on_the_cpu(tmp_path: Path) -> None:
    """Issue 6, done-when 3: a tiny random model, ORAN-Bench's own files, bad items told and none dropped in silence."""
    save_model(tmp_path / "tiny")
    flags = ("--model", "./tiny", f"data={ORAN}", "n_questions=all", "-d", "mixed", "max_new_tokens=2")
    done = run(tmp_path, *flags)
    assert done.returncode == ExitCode.DONE, done.stderr
    for words in (
        "61 questions, 56 of them usable",
        "no choices; not asked: fin_M.json:20",
        "easy: always answering 2 is right in 40.0% of 20",
        "policies = no-retrieval  (no corpus is named",
        "engine: transformers",
    ):
        assert words in done.stderr, words
    document = results(tmp_path)
    assert document["metrics"]["questions"] == 56
    assert len({record["question_id"] for record in document["results"]}) == 56
    assert document["metrics"]["new_tokens"] > 56
    assert len(document["remarks"]) == 10


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("engine=eval_engines:OutOfMemory",), ExitCode.OUT_OF_MEMORY, "not even one prompt fits"),
        (("engine=eval_engines:Faulty",), ExitCode.FAILED, "ZeroDivisionError: a bug of the engine"),
        (("engine=auto", "--model", "./absent"), ExitCode.MISSING, "there is no folder ./absent"),
        (("data=absent.jsonl",), ExitCode.MISSING, "absent.jsonl"),
        (("--n-questions", "0"), ExitCode.USAGE, "--n-questions: n_questions: expected"),
        (("retrieval=none", "--compare"), ExitCode.USAGE, "the policy mdp retrieves, and there is nothing"),
        (("--gpu-ids", "0", "1"), ExitCode.MISSING, "`0` names no GPU here"),
    ],
)
def test_what_cannot_be_ends_with_one_clear_error(
    bench: Path, arguments: tuple[str, ...], code: ExitCode, words: str
) -> None:
    """Issue 6: a failure of a worker is one error of the command, with its exit code; the rest fails before a start."""
    done = run(bench, "eval.yaml", *arguments)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("error: ") == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_an_evaluation_that_is_running_keeps_others_out(bench: Path) -> None:
    """Issue 6, files: one writer each; a second command is told who works there."""
    gate = bench / "gate"
    close_gate(gate, 1, before_call=1)
    first = start(bench, "eval.yaml", gate=gate)
    held(gate, 1)
    second = run(bench, "eval.yaml")
    assert second.returncode == ExitCode.USAGE
    assert f"another process works on {bench / 'results'}" in second.stderr
    (gate / "open").touch()
    _, said = first.communicate(timeout=DEADLINE_S)
    assert first.returncode == ExitCode.DONE, said


def test_other_settings_are_refused_and_fresh_asks_again(bench: Path) -> None:
    """Issue 6, files: answers of another seed are not mixed in; --fresh keeps them aside."""
    assert run(bench, "eval.yaml", "policies=[fixed:1]").returncode == ExitCode.DONE
    refused = run(bench, "eval.yaml", "policies=[fixed:1]", "max_new_tokens=9")
    assert refused.returncode == ExitCode.USAGE
    assert "max_new_tokens was 64, and is 9" in refused.stderr
    again = run(bench, "eval.yaml", "policies=[fixed:1]", "max_new_tokens=9", "--fresh")
    assert again.returncode == ExitCode.DONE, again.stderr
    assert answered(bench) == QUESTIONS
    assert [path.name for path in (bench / "results" / "multi_gpu").glob("*.lines/old-1/*")]


def test_a_dry_run_starts_nothing(bench: Path) -> None:
    """Commands: checks and choices are printed, one command a worker, no results."""
    done = run(bench, "eval.yaml", "--workers", "2", "--dry-run")
    assert done.returncode == ExitCode.DONE, done.stderr
    assert done.stdout.count("-m trainwright.evaluate.workers.serve") == 2
    told = run(bench, "eval.yaml", "--quick", "--dry-run", "--json")
    assert told.returncode == ExitCode.DONE, told.stderr
    tests = json.loads(told.stdout)["tests"]
    assert [test["policies"] for test in tests] == [["mdp"], ["mdp"], ["mdp", "fixed:3"]]
    assert tests[0]["workers"][0]["command"][-2:] == ["trainwright.evaluate.workers.serve", "SOCKET"]
    assert not (bench / "results").exists()


def test_quick_runs_the_guides_three_tests_of_five_questions(bench: Path) -> None:
    """S3-03."""
    done = run(bench, "eval.yaml", "--quick", "--json")
    assert done.returncode == ExitCode.DONE, done.stderr
    tests = json.loads(done.stdout)["tests"]
    assert [test["config"]["n_questions"] for test in tests] == [5, 5, 5]
    assert [test["gpu_mode"] for test in tests] == ["single", "data_parallel", "single"]
    assert "Test 3 of 3: two policies compared" in done.stderr
    assert done.stderr.count("always answering") == len({"easy", "medium", "hard"})
    assert {"mdp_strategy", "fixed_strategy"} <= set(tests[2])


def test_a_terminal_that_is_narrow_keeps_the_guides_columns(bench: Path) -> None:
    """S3-27: on 60 columns the table does not wrap; what has no room in it follows in lines."""
    asked = [*command("eval.yaml", "--compare", "always-reason", "no-retrieval", "--seed", "7")]
    in_terminal = (
        "import os, pty, sys\n"
        "status = pty.spawn(['sh', '-c', 'stty cols 60; exec \"$@\"', 'sh', *sys.argv[1:]])\n"
        "sys.exit(os.waitstatus_to_exitcode(status))\n"
    )
    surroundings = {key: value for key, value in environment().items() if key != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-c", in_terminal, *asked],
        cwd=bench, env=surroundings, capture_output=True, text=True, timeout=DEADLINE_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == ExitCode.DONE, done.stdout
    lines = done.stdout.replace("\r", "").splitlines()
    head = lines.index("COMPARISON RESULTS")
    assert all(len(line) <= 60 for line in lines[head : head + 7])
    assert "unparsable, 95 % interval" in lines[head + 7]


def test_replicas_see_the_gpus_of_their_group() -> None:
    """S3-10, S3-11, X-09: where a card is too small each worker gets a group of its own, and no other GPU."""
    asked = load_evaluation(None, ["data=x", "model=Qwen/Qwen2.5-14B-Instruct", "dtype=fp16"])
    found = spread(asked, parse_inventory("rtx-3060-12gb:8"), length=800)
    assert found.mode.value == "data_parallel"
    assert found.on_cuda
    sizes = {len(replica.placement) for replica in found.replicas}
    assert len(sizes) == 1 and sizes.pop() > 2
    visible = [replica.environment["CUDA_VISIBLE_DEVICES"].split(",") for replica in found.replicas]
    assert len({device for group in visible for device in group}) == sum(map(len, visible)) == len(found.gpu_ids)
    alone = load_evaluation(None, ["data=x", "model=Qwen/Qwen2.5-14B-Instruct", "dtype=fp16", "gpu_mode=single"])
    with pytest.raises(UserError, match="does not fit") as refusal:
        spread(alone, parse_inventory("rtx-3060-12gb:8"), length=800)
    assert refusal.value.exit_code is ExitCode.NO_PLAN_FITS


def test_gpus_that_torch_does_not_see_are_a_problem_before_the_run() -> None:
    """S3-32: the GPU is only written down, so torch, asked in a process of its own, finds none."""
    asked = load_evaluation(None, ["data=x", "model=Qwen/Qwen2.5-1.5B-Instruct"])
    inventory = parse_inventory("a100-80gb:1")
    checks = run_checks(asked, inventory, spread(asked, inventory, length=800))
    assert [check.what for check in checks if check.level == "problem"] == ["torch.cuda.is_available() is False"]
    with pytest.raises(UserError) as refusal:
        require(checks)
    assert refusal.value.exit_code is ExitCode.MISSING
    assert "install a torch built for this driver" in refusal.value.hints[0]


def test_claims_of_the_guide_are_shown_for_exactly_its_own_runs() -> None:
    """S3-19, S3-20."""
    mdp, fixed, other = (strategy(name, PRESETS["guide"]) for name in ("mdp", "fixed:3", "fixed:2"))
    found = claims("Qwen/Qwen2.5-7B-Instruct", "medium", 100, [mdp, fixed])
    assert [str(claim) for claim in found] == [
        "mdp: accuracy 75-78 %, cost 0.52-0.55, iterations 9-10",
        "fixed:3: accuracy 60-65 %, cost 0.35, iterations 4",
    ]
    assert [claim.accuracy for claim in claims("Qwen/Qwen2.5-14B-Instruct", "medium", 100, [other, mdp])] == ["82-85 %"]
    assert not claims("Qwen/Qwen2.5-1.5B-Instruct", "medium", 100, [mdp])
    assert not claims("Qwen/Qwen2.5-7B-Instruct", "easy", 100, [mdp])
    assert not claims("Qwen/Qwen2.5-7B-Instruct", "medium", 10, [mdp])
