"""The demo's stories: what is asked at the end can only be read, never remembered (issue: `trainwright demo`)."""

from __future__ import annotations

import re

import pytest

from trainwright.demo.data import Row, StoryQuestion, brief_rows, held_out_questions, training_rows

SENTENCE = re.compile(r"[A-Z][a-z]+ [a-z]+ [a-z]+\.")
NAME = re.compile(r"know of (.*)\?")


def sentences(*texts: str) -> set[str]:
    return {sentence for text in texts for sentence in SENTENCE.findall(text)}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return list(training_rows(3, 5_000))


@pytest.fixture(scope="module")
def questions() -> list[StoryQuestion]:
    return held_out_questions(3, 200, facts=3)


def test_the_same_seed_gives_the_same_data_and_another_seed_other_data(
    rows: list[Row], questions: list[StoryQuestion]
) -> None:
    assert list(training_rows(3, 5_000)) == rows
    assert list(training_rows(4, 5_000)) != rows
    assert held_out_questions(3, 200, facts=3) == questions
    assert held_out_questions(4, 200, facts=3) != questions


def test_no_fact_of_the_questions_is_told_anywhere_in_the_training_data(
    rows: list[Row], questions: list[StoryQuestion]
) -> None:
    told = sentences(*(text for row in [*rows, *brief_rows(3, 3_000)] for text in row.values()))
    asked = sentences(*(text for question in questions for text in (question.story, question.answer)))
    assert len(told) > 3_000
    assert len(asked) > 200
    assert not told & asked


def test_every_answer_is_read_from_the_story(rows: list[Row]) -> None:
    for row in rows:
        story, question = row["prompt"].split("\n")
        names = NAME.search(question)
        assert names is not None
        answers = SENTENCE.findall(row["response"])
        assert row["response"] == " " + " ".join(answers)
        assert [answer.split()[0] for answer in answers] == names[1].split(", ")
        assert set(answers) <= sentences(story)
        assert len({fact.split()[0] for fact in sentences(story)}) == len(SENTENCE.findall(story)), "one fact a name"


def test_a_held_out_question_has_one_answer_which_only_its_story_tells(questions: list[StoryQuestion]) -> None:
    for question in questions:
        facts = SENTENCE.findall(question.story)
        names = NAME.search(question.question)
        assert len(facts) == 3
        assert names is not None
        assert [fact for fact in facts if fact.split()[0] == names[1]] == [question.answer]
        assert question.answer in question.prompt(with_story=True)
        assert not sentences(question.prompt(with_story=False))
    assert {question.story.index(question.answer) == 0 for question in questions} == {True, False}


def test_brief_answers_leave_the_name_out() -> None:
    for row in brief_rows(3, 200):
        name = NAME.search(row["prompt"])
        assert name is not None
        assert f"{name[1]}{row['response']}" in sentences(row["prompt"])
