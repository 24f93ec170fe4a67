"""Benchmarks as they are published, read into questions; what is odd about a question is kept as a remark.

Rows are ORAN-Bench-13K's own lines, `[question, ["1. ...", ...], "n"]`, or objects with

    question (or query), choices and answer     multiple choice; lm-eval's `gold` and ARC's `answerKey` serve as well
    question and answer (or answers)            short answer

and optionally id, difficulty, gold_passages, and search: what to search for instead of the question.
"""

from __future__ import annotations

import json
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.errors import ExitCode, UserError
from trainwright.evaluate.questions.choice_answers import as_number, chosen, first_number, without_numbers
from trainwright.evaluate.questions.question import Question, QuestionSet, Remark
from trainwright.evaluate.questions.rows import Row, read_rows, refused

# The files are named fin_E, fin_M and fin_H; the benchmark's own README calls the third fin_D.
ORAN_DIFFICULTIES = {"fin_E": "easy", "fin_M": "medium", "fin_H": "hard", "fin_D": "hard"}


@dataclass(frozen=True)
class _Draft:
    """A row as it stands in the file, before it is known how the file counts its choices."""

    line: int
    id: str
    text: str
    choices: tuple[str, ...] | None
    """None for a short answer."""
    labels: tuple[str, ...]
    answer: Any
    difficulty: str | None
    gold_passages: tuple[str, ...]
    search: str | None
    first: int | None
    """The number that the file gives the first choice, where its format says so."""


def read_questions(
    *paths: Path,
    first_choice: int | None = None,
    fields: Mapping[str, str] | None = None,
    suffix: str | None = None,
) -> QuestionSet:
    """Return the questions of files, or of ORAN-Bench-13K's folder.

    `first_choice` is the number by which answers mean the first choice, where the file leaves it open; `fields` gives
    our name of a column its name in the file, `suffix` says what a file is whatever its name.

    Raises:
        UserError: there is no such file, rows are no questions (each named by its line), or two share an id.
    """
    files = [file for path in paths for file in _files(path)]
    sets = [_read_file(file, first_choice, fields or {}, suffix) for file in files]
    read = QuestionSet(
        tuple(question for of_file in sets for question in of_file.questions),
        tuple(question for of_file in sets for question in of_file.unusable),
        tuple(remark for of_file in sets for remark in of_file.remarks),
    )
    if repeated := [name for name, count in Counter(asked.id for asked in read.everything).items() if count > 1]:
        raise UserError(
            f"two files share {len(repeated):,} ids of questions, such as {repeated[0]!r}",
            hints=["give their rows ids of their own, or the files other names"],
        )
    return read


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = [path / f"{name}.json" for name in ORAN_DIFFICULTIES if (path / f"{name}.json").exists()]
    if not files:
        raise UserError(
            f"{path} holds no fin_E.json, fin_M.json or fin_H.json",
            hints=["name the file of questions itself"],
            exit_code=ExitCode.MISSING,
        )
    return files


def _read_file(path: Path, first_choice: int | None, fields: Mapping[str, str], suffix: str | None) -> QuestionSet:
    drafts = _drafts(path, fields, suffix)
    first = _first_choice(path, drafts, first_choice)
    usual = Counter(len(draft.choices) for draft in drafts if draft.choices).most_common(1)
    usual_choices = usual[0][0] if usual else 0
    questions: list[Question] = []
    unusable: list[Question] = []
    remarks: list[Remark] = []
    for draft in drafts:
        question, trouble = _question(draft, first if draft.first is None else draft.first)
        (unusable if trouble else questions).append(question)
        notes = [f"{trouble}; not asked"] if trouble else _oddities(draft, usual_choices)
        remarks += [Remark(question.id, f"{path.name}:{draft.line}", note) for note in notes]
    return QuestionSet(tuple(questions), tuple(unusable), tuple(remarks))


def _oddities(draft: _Draft, usual_choices: int) -> list[str]:
    """Return what is odd about a question that is asked nevertheless."""
    choices, oddities = draft.choices or (), []
    if choices and len(choices) != usual_choices:
        oddities.append(f"{len(choices)} choices, not {usual_choices}; asked")
    if len(set(choices)) < len(choices):
        oddities.append("two of its choices are the same; asked")
    return oddities


def _drafts(path: Path, fields: Mapping[str, str], suffix: str | None) -> list[_Draft]:
    drafts: list[_Draft] = []
    problems = []
    for line, content in read_rows(path, suffix):
        try:
            drafts.append(_draft(path, (line, _with_our_names(content, fields))))
        except ValueError as error:
            problems.append(f"{path.name}:{line}: {error}")
    repeated = {name for name, count in Counter(draft.id for draft in drafts).items() if count > 1}
    problems += [
        f"{path.name}:{draft.line}: the id {draft.id!r} is used more than once"
        for draft in drafts
        if draft.id in repeated
    ]
    if problems:
        raise refused(path, problems)
    if not drafts:
        raise UserError(f"{path} holds no questions")
    return drafts


def _question(draft: _Draft, first: int) -> tuple[Question, str | None]:
    """Return the question, and why it cannot be asked if so."""

    def made(answer: int | tuple[str, ...]) -> Question:
        return Question(
            draft.id,
            draft.text,
            draft.choices or (),
            answer,
            draft.difficulty,
            draft.gold_passages,
            draft.search,
        )

    no_text = None if draft.text else "no question text"
    if draft.choices is None:
        accepted = draft.answer if isinstance(draft.answer, list) else [draft.answer]
        answers = tuple(str(answer).strip() for answer in accepted if str(answer).strip())
        return made(answers or ("",)), no_text or (None if answers else "no answer")
    number = chosen(draft.answer, draft.choices, draft.labels, first)
    if number is not None:
        return made(number), no_text or (None if len(draft.choices) > 1 else "only one choice")
    shown = as_number(draft.answer)
    wrong = f"the answer {draft.answer!r} is none of the {len(draft.choices)} choices"
    return made(("",) if shown is None else shown - first + 1), wrong if draft.choices else "no choices"


def _first_choice(path: Path, drafts: Sequence[_Draft], given: int | None) -> int:
    if given is not None:
        return given
    numbers = [
        (number, len(draft.choices))
        for draft in drafts
        if draft.choices and draft.first is None and not draft.labels
        if (number := as_number(draft.answer)) is not None and draft.answer not in draft.choices
    ]
    first = first_number(numbers)
    if numbers and first is None:
        raise UserError(
            f"{path} does not tell whether its answers count the choices from 0 or from 1",
            hints=["set first_choice to 0 or 1"],
        )
    return 1 if first is None else first


def _draft(path: Path, row: Row) -> _Draft:
    line, content = row
    stem = path.name.partition(".")[0]
    if isinstance(content, list):
        return _draft_of_oran_line(stem, line, content)
    if isinstance(content, dict):
        return _draft_of_object(stem, line, content)
    raise ValueError(f"a {type(content).__name__}, not an object with question and answer")


def _draft_of_oran_line(stem: str, line: int, content: list[Any]) -> _Draft:
    if len(content) != 3:
        raise ValueError(f"a list of {len(content)} items, not of question, choices and answer")
    text, choices, answer = content
    texts, labels = _choices(choices)
    difficulty = ORAN_DIFFICULTIES.get(stem)
    return _Draft(line, f"{stem}-{line}", _text(text), texts, labels, answer, difficulty, (), None, 1)


def _draft_of_object(stem: str, line: int, content: dict[str, Any]) -> _Draft:
    present = {key: value for key, value in content.items() if value is not None}
    choices, labels = _choices_of(present)
    # lm-eval counts `gold` from 0, which Python lists made the custom.
    first = 0 if "gold" in present and "answer" not in present else None
    answer = next((present[key] for key in ("answer", "answerKey", "gold", "answers") if key in present), None)
    if answer is None:
        raise ValueError(f"no answer; its keys are {', '.join(map(str, content)) or 'none'}")
    if isinstance(answer, list) and choices is not None and len(answer) == 1:
        answer = answer[0]
    difficulty = present.get("difficulty")
    return _Draft(
        line,
        str(present.get("id", present.get("question_id", f"{stem}-{line}"))),
        _text(present.get("question", present.get("query"))),
        choices,
        labels,
        answer,
        None if difficulty in (None, "") else str(difficulty),
        _strings(present.get("gold_passages", [])),
        str(present["search"]) if present.get("search") else None,
        first,
    )


def _with_our_names(content: Any, fields: Mapping[str, str]) -> Any:
    """Return a row with its columns under our names, where it bears others."""
    if not fields or not isinstance(content, dict):
        return content
    others = {key: value for key, value in content.items() if key not in fields}
    return others | {ours: content[theirs] for ours, theirs in fields.items() if theirs in content}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("no question")
    return value.strip()


def _choices_of(row: Mapping[str, Any]) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """Return choices and their labels, from a list, from ARC's object of both, or from columns A, B, C ..."""
    choices = row.get("choices")
    if isinstance(choices, str):
        try:
            choices = json.loads(choices)
        except ValueError as error:
            raise ValueError("its choices are no JSON list of texts") from error
    if isinstance(choices, dict):
        return _strings(choices.get("text")), _strings(choices.get("label", []))
    if choices is None:
        columns = tuple(letter for letter in string.ascii_uppercase if row.get(letter))
        return (tuple(str(row[letter]).strip() for letter in columns), columns) if columns else (None, ())
    return _choices(choices)


def _choices(value: object) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if not isinstance(value, list):
        raise ValueError("its choices are no list of texts")
    return without_numbers(_strings(value))


def _strings(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(item, str | int | float) for item in value):
        raise ValueError(f"{value!r:.40} is no list of texts")
    return tuple(map(str, value))
