"""`trainwright eval` on the command line: the guide's spellings, lists of values, what a file may hold."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainwright.cli.eval import with_lists
from trainwright.errors import ExitCode, UserError
from trainwright.evaluate.eval_config import load_evaluation


@pytest.mark.parametrize(
    ("typed", "spelled"),
    [
        ("eval --gpu-ids 0 1 2 3 -n 5", "eval --gpu-ids=0 --gpu-ids=1 --gpu-ids=2 --gpu-ids=3 -n 5"),
        ("eval --gpu_ids 0 e.yaml seed=1", "eval --gpu_ids=0 e.yaml seed=1"),
        ("eval e.yaml --compare mdp fixed:3 seed=1", "eval e.yaml --compare=mdp --compare=fixed:3 seed=1"),
        ("eval --compare mdp e.yaml", "eval --compare=mdp e.yaml"),
        ("eval --compare --seed 7", "eval --compare= --seed 7"),
        ("eval --gpu-ids=0,1", "eval --gpu-ids=0,1"),
        ("train --gpus 0", "train --gpus 0"),
    ],
)
def test_a_flag_takes_all_values_that_follow_it(typed: str, spelled: str) -> None:
    """S3-05, S3-07: `--gpu_ids 0 1 2 3` as the guide writes it; what comes after is none of its values."""
    assert with_lists(typed.split()) == spelled.split()


def test_a_file_is_read_like_a_job_with_places_and_nearest_names(tmp_path: Path) -> None:
    """Issue 6: unknown keys are refused with the nearest name; every problem at once, by file, line and column."""
    path = tmp_path / "e.yaml"
    path.write_text("modle: x\ndata: {path: q.jsonl, fields: {anser: label}}\ngpu_mode: data-parallel\nfixed_k: 3\n")
    with pytest.raises(UserError) as refusal:
        load_evaluation(str(path), ["retrieval.k=0"], {"seed": ("--seed", 1)})
    assert refusal.value.problems == (
        f"{path}:1:1: modle: unknown key; did you mean `model`?",
        f"{path}:2:32: data.fields.anser: unknown key; did you mean `answer`?",
        f"{path}:3:1: gpu_mode: expected one of `auto`, `single`, `data_parallel`, `accelerate`, not the text "
        "`data-parallel`; did you mean `data_parallel`?",
        f"{path}:4:1: fixed_k: unknown key; write `policies: [fixed:3]`",
        "override: retrieval.corpus: this key is needed: A folder of text files, or a .jsonl file of rows with a text.",
        "override: retrieval.k: expected a whole number above 0, not the number `0`",
    )


def test_defaults_are_those_of_the_guide_and_later_values_win(tmp_path: Path) -> None:
    """S3-08: 100 questions, seed 42, the 7B model; a flag over the file, an override over both."""
    path = tmp_path / "e.yaml"
    path.write_text("data: q.jsonl\nseed: 1\nn_questions: 5\n")
    asked = load_evaluation(str(path))
    assert (asked.model, asked.seed, asked.gpu_mode) == ("Qwen/Qwen2.5-7B-Instruct", 1, "auto")
    laid = load_evaluation(str(path), ["seed=3"], {"seed": ("--seed", 2), "n_questions": ("--n-questions", 7)})
    assert (laid.seed, laid.n_questions) == (3, 7)
    bare = load_evaluation(None, ["data=q.jsonl"])
    assert (bare.n_questions, bare.seed, bare.questions.paths) == (100, 42, (Path("q.jsonl"),))


def test_columns_of_other_names_and_files_of_other_suffixes_are_read(tmp_path: Path) -> None:
    """Issue 6, data: any rows of question, choices, answer, from several files at once."""
    from trainwright.evaluate.preparing import prepare_evaluation

    (tmp_path / "a.txt").write_text('{"prompt": "Which?", "options": ["x", "y"], "label": 2}\n')
    (tmp_path / "b.csv").write_text("question,answer\nWho?,Ada\n")
    fields = "{question: prompt, choices: options, answer: label}"
    data = [f"data.path=[{tmp_path / 'a.txt'}]", "data.format=jsonl", f"data.fields={fields}", "data.first_choice=1"]
    one = prepare_evaluation(load_evaluation(None, data))
    assert [(question.text, question.answer) for question in one.questions] == [("Which?", 2)]
    assert (one.difficulty, one.choices["n_questions"].value) == ("mixed", 1)
    two = [f"data.path=[{tmp_path / 'b.csv'}, {tmp_path / 'b.csv'}]"]
    with pytest.raises(UserError, match="share 1 ids"):
        prepare_evaluation(load_evaluation(None, two))


def test_help_names_the_guides_flags() -> None:
    """S3-07, S3-08."""
    done = subprocess.run([sys.executable, "-m", "trainwright", "eval", "--help"], capture_output=True, text=True)
    assert done.returncode == ExitCode.DONE
    for flag in ("--n_questions", "--difficulty", "--gpu_mode", "--gpu_ids", "--fixed_k", "--seed", "--compare"):
        assert flag in done.stdout


def test_the_files_that_the_documentation_shows_can_be_read() -> None:
    """The example and the page's own file are evaluations."""
    root = Path(__file__).parents[2]
    assert load_evaluation(str(root / "examples" / "eval.yaml")).difficulty == "medium"
    [shown] = re.findall(r"```yaml\n(.*?)```", (root / "docs" / "evaluation.md").read_text(), re.DOTALL)
    overrides = [f"{key}={value}" for key, value in re.findall(r"^(\w+): (.*?)(?: +#.*)?$", shown, re.MULTILINE)]
    assert load_evaluation(None, overrides).policies == ["mdp", "fixed:3"]
