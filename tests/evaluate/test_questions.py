"""Benchmarks as they are published: what is read, what is odd, and which questions are asked."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from trainwright.errors import ExitCode, UserError
from trainwright.evaluate.questions.question import Question, constant_baselines
from trainwright.evaluate.questions.question_files import read_questions
from trainwright.evaluate.questions.selection import select

SAMPLE = Path(__file__).parents[1] / "data" / "oran_bench"


def written(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_oran_bench_is_read_as_it_is_published() -> None:
    """S3-44, S3-45: JSON Lines despite the name, three files, options without their numbers, answers from 1."""
    read = read_questions(SAMPLE)
    assert len(read.everything) == 61
    assert Counter(question.difficulty for question in read.everything) == {"easy": 20, "medium": 23, "hard": 18}
    first = read.questions[0]
    assert first.id == "fin_E-1"
    assert (
        first.text == "Which O-RAN Working Group focuses on the architecture description of Open Radio Access Networks?"
    )
    assert first.choices == ("O-RAN.WG3", "O-RAN.WG4", "O-RAN.WG1", "O-RAN.WG5")
    assert first.answer == 3


def test_bad_questions_of_oran_bench_are_named_not_dropped() -> None:
    """S3-46: without choices or text they are not asked; with 3, 5 or 6 choices they are; repeats are counted."""
    read = read_questions(SAMPLE)
    report = "\n".join(read.report())
    for remark in (
        "fin_M.json:19: no question text; not asked",
        "fin_M.json:20: no choices; not asked",
        "fin_M.json:22: 6 choices, not 4; asked",
        "fin_M.json:23: 3 choices, not 4; asked",
        "fin_H.json:16: 5 choices, not 4; asked",
        "fin_H.json:17: no choices; not asked",
        "fin_H.json:18: no question text; not asked",
        "fin_E.json:18: two of its choices are the same; asked",
    ):
        assert remark in report
    assert "61 questions, 56 of them usable" in report
    assert len(read.unusable) == 5
    assert read.repeats() == 2, "one question word for word, and the second without any text"
    answers = {question.id: question.answer for question in read.questions}
    assert (answers["fin_M-22"], answers["fin_H-16"]) == (6, 5)


def test_constant_answers_are_the_baseline() -> None:
    """S3-47: the best constant answer of each difficulty, over every question whose answer is known."""
    questions = [Question(str(n), "?", ("a", "b"), answer, "easy") for n, answer in enumerate([1, 2, 2, 1, 2])]
    questions.append(Question("hard", "?", ("a", "b"), 1, "hard"))
    baselines = constant_baselines(questions)
    assert (baselines["easy"].answer, baselines["easy"].accuracy) == (2, 0.6)
    assert (baselines["hard"].answer, baselines["hard"].accuracy) == (1, 1.0)
    assert "easy: always answering 2 is right in 40.0% of 20" in "\n".join(read_questions(SAMPLE).report())


@pytest.mark.parametrize(
    "rows",
    [
        [{"question": "?", "choices": ["a", "b", "c"], "answer": "B"}],
        [{"question": "?", "choices": ["a", "b", "c"], "answer": "b"}],
        [{"question": "?", "choices": ["1. a", "2. b", "3. c"], "answer": "2"}],
        [{"query": "?", "choices": ["a", "b", "c"], "gold": 1}],
        [{"query": "?", "choices": ["a", "b", "c"], "gold": [1]}],
        [{"question": "?", "choices": {"text": ["a", "b", "c"], "label": ["1", "2", "3"]}, "answerKey": "2"}],
        [{"question": "?", "choices": ["a", "b", "c"], "answer": n} for n in (1, 0)],
        [{"question": "?", "choices": ["a", "b", "c"], "answer": n} for n in (2, 3)],
    ],
    ids=["letter", "text", "numbered", "lm-eval", "lm-eval list", "ARC", "counted from 0", "counted from 1"],
)
def test_answers_mean_the_same_choice_however_they_are_written(rows: list[object], tmp_path: Path) -> None:
    """Issue 6, data: letters, labels, texts and numbers; a file that counts from 0 shows it by an answer 0."""
    question = read_questions(written(tmp_path / "questions.jsonl", *rows)).questions[0]
    assert question.choices == ("a", "b", "c")
    assert question.answer == 2


def test_a_file_that_leaves_the_counting_open_is_not_guessed(tmp_path: Path) -> None:
    """Issue 6, data: with answers 1 and 2 of three choices, either could be meant."""
    path = written(tmp_path / "q.jsonl", *({"question": "?", "choices": ["a", "b", "c"], "answer": n} for n in (1, 2)))
    with pytest.raises(UserError, match="from 0 or from 1") as refusal:
        read_questions(path)
    assert "first_choice" in refusal.value.hints[0]
    assert [question.answer for question in read_questions(path, first_choice=0).questions] == [2, 3]
    assert [question.answer for question in read_questions(path, first_choice=1).questions] == [1, 2]


def test_csv_parquet_and_json_arrays_hold_the_same_questions(tmp_path: Path) -> None:
    """Issue 6, data: choices as a JSON list or in columns A, B, C."""
    rows = [{"question": "Sky, or\nsea?", "choices": ["red", "blue"], "answer": "B", "difficulty": "easy", "id": "s"}]
    (tmp_path / "q.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "listed.csv").write_text(
        'id,question,choices,answer,difficulty\ns,"Sky, or\nsea?","[""red"", ""blue""]",B,easy\n'
    )
    (tmp_path / "columns.csv").write_text('id,question,A,B,answer,difficulty\ns,"Sky, or\nsea?",red,blue,B,easy\n')
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist(rows), tmp_path / "q.parquet")
    expected = (Question("s", "Sky, or\nsea?", ("red", "blue"), 2, "easy"),)
    for name in ("q.json", "listed.csv", "columns.csv", "q.parquet"):
        assert read_questions(tmp_path / name).questions == expected, name


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 6, data."""
    (tmp_path / "q.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match="needs pyarrow") as refusal:
        read_questions(tmp_path / "q.parquet")
    assert refusal.value.exit_code is ExitCode.MISSING


def test_short_answers_and_gold_passages(tmp_path: Path) -> None:
    """Issue 6, data: one accepted answer or several, and the passages that hold them."""
    read = read_questions(
        written(
            tmp_path / "qa.jsonl",
            {"question": "Who?", "answer": "Ada Lovelace", "gold_passages": ["p7"]},
            {"question": "When?", "answers": ["1843", "in 1843"]},
            {"question": "Why?", "answer": ""},
        )
    )
    assert [question.answer for question in read.questions] == [("Ada Lovelace",), ("1843", "in 1843")]
    assert read.questions[0].gold_passages == ("p7",)
    assert [remark.what for remark in read.remarks] == ["no answer; not asked"]


def test_wrong_rows_are_named_by_their_lines_all_at_once(tmp_path: Path) -> None:
    """Issue 6, data: nothing is asked before every line can be."""
    path = tmp_path / "wrong.jsonl"
    path.write_text('{"question": "?", "answer": "x", "id": "a"}\n{"question": 3, "answer": "x"}\nnot json\n')
    with pytest.raises(UserError) as refusal:
        read_questions(path)
    assert [problem.split(": ")[0] for problem in refusal.value.problems] == ["wrong.jsonl:3"]
    written(
        path, {"question": 3, "answer": "x"}, {"question": "?"}, {"question": "?", "answer": "x", "choices": 4}, "?"
    )
    with pytest.raises(UserError) as refusal:
        read_questions(path)
    assert [problem.split(": ")[0] for problem in refusal.value.problems] == [
        f"wrong.jsonl:{line}" for line in (1, 2, 3, 4)
    ]
    written(path, *({"question": "?", "answer": "x", "id": "same"} for _ in range(2)))
    with pytest.raises(UserError) as refusal:
        read_questions(path)
    assert len(refusal.value.problems) == 2


def test_an_answer_that_is_no_choice_is_named(tmp_path: Path) -> None:
    """S3-46: it is left out of the run and reported."""
    path = written(
        tmp_path / "q.jsonl",
        {"question": "1?", "choices": ["a", "b"], "answer": "E"},
        {"question": "2?", "choices": ["a", "b"], "answer": "A"},
    )
    read = read_questions(path)
    assert [question.id for question in read.questions] == ["q-2"]
    assert read.remarks[0].what == "the answer 'E' is none of the 2 choices; not asked"


def make(counts: dict[str, int]) -> list[Question]:
    return [
        Question(f"{difficulty}-{number}", "?", ("a", "b"), 1, difficulty)
        for difficulty, count in counts.items()
        for number in range(count)
    ]


def test_mixed_takes_each_difficulty_in_its_proportion() -> None:
    """S3-07, T-22: 1,000 of ORAN-Bench's proportions; as near as whole questions allow, and exactly n."""
    questions = make({"easy": 1139, "medium": 9570, "hard": 3243})
    chosen = select(questions, n=1000, difficulty="mixed", seed=42)
    assert Counter(question.difficulty for question in chosen) == {"easy": 82, "medium": 686, "hard": 232}
    for n in (1, 7, 23):
        assert len(select(questions, n=n, difficulty="mixed", seed=42)) == n


def test_a_selection_is_the_same_for_the_same_seed_and_grows_in_place() -> None:
    """S3-08, T-24: seeded; another seed chooses others; 100 questions hold those of 20."""
    questions = make({"easy": 300, "medium": 300})
    few = select(questions, n=20, difficulty="medium", seed=42)
    assert few == select(questions, n=20, difficulty="medium", seed=42)
    assert {question.difficulty for question in few} == {"medium"}
    assert few != select(questions, n=20, difficulty="medium", seed=43)
    assert set(few) <= set(select(questions, n=100, difficulty="medium", seed=42))
    assert select(questions, n=None, difficulty="mixed", seed=42) == questions


def test_more_questions_than_there_are_is_refused_with_the_counts() -> None:
    """S3-07."""
    with pytest.raises(UserError) as refusal:
        select(make({"easy": 3}), n=4, difficulty="easy", seed=0)
    assert "easy: 3" in refusal.value.render()
    with pytest.raises(UserError, match="all hard questions"):
        select(make({"easy": 3}), n=None, difficulty="hard", seed=0)
    with pytest.raises(UserError, match="0 questions"):
        select(make({"easy": 3}), n=0, difficulty="easy", seed=0)
