"""Columns are found by name, and a value that is no text is named with its column (D01)."""

from __future__ import annotations

import pytest

from trainwright.errors import UserError
from trainwright.train.data.columns import MOST_CHARACTERS, Columns, check_text, find_columns
from trainwright.train.data.problems import RowError


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["prompt", "response"], Columns(prompt="prompt", response="response")),
        (["id", "Question", "Answer"], Columns(prompt="Question", response="Answer")),
        (["instruction", "input", "output"], Columns(prompt="instruction", response="output", context="input")),
        (["input", "output"], Columns(prompt="input", response="output")),
        (["text", "id"], Columns(text="text")),
        (["messages", "prompt", "response"], Columns(messages="messages")),
        (["text", "prompt", "completion"], Columns(prompt="prompt", response="completion")),
    ],
)
def test_columns_found_by_name(names: list[str], expected: Columns) -> None:
    assert find_columns(names, {}) == expected


def test_named_columns_win_over_found_ones() -> None:
    names = ["prompt", "response", "summary", "chat"]
    assert find_columns(names, {"response": "summary"}) == Columns(prompt="prompt", response="summary")
    assert find_columns(names, {"messages": "chat"}) == Columns(messages="chat")
    assert find_columns(names, {"prompt": "chat", "response": "prompt"}) == Columns(prompt="chat", response="prompt")


def test_no_known_column_lists_what_there_is_and_how_to_name_it() -> None:
    with pytest.raises(UserError, match="the data has the columns alpha, beta") as caught:
        find_columns(["alpha", "beta"], {})
    assert "data.columns={prompt: NAME, response: NAME}" in caught.value.hints[0]


def test_a_named_column_that_is_not_there_gets_a_near_one() -> None:
    with pytest.raises(UserError) as caught:
        find_columns(["question", "answer"], {"prompt": "qestion"})
    assert caught.value.problems == ("data.columns.prompt: there is no column `qestion`",)
    assert caught.value.hints == ("did you mean `question`?",)


def test_a_pair_is_needed_where_text_makes_no_sense() -> None:
    with pytest.raises(UserError):
        find_columns(["text"], {}, pairs_only=True)
    with pytest.raises(UserError):
        find_columns(["text"], {"text": "text"}, pairs_only=True)


def test_two_kinds_at_once_are_refused() -> None:
    with pytest.raises(UserError) as caught:
        find_columns(["a", "b"], {"text": "a", "prompt": "b"})
    assert "more than one kind" in caught.value.problems[0]


def test_context_follows_the_instruction_and_may_be_empty() -> None:
    columns = find_columns(["instruction", "input", "output"], {})
    assert columns.read_pair({"instruction": "Add.", "input": "1 2", "output": "3"}) == ("Add.\n\n1 2", "3")
    for empty in ({"input": ""}, {"input": None}, {}):
        assert columns.read_pair({"instruction": "Go.", "output": "Gone."} | empty) == ("Go.", "Gone.")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "null"),
        (3, "expected text, found int"),
        (b"raw", "expected text, found bytes"),
        ("a\0b", "NUL"),
        ("half \ud800", "surrogate pair at character 5"),
        ("x" * (MOST_CHARACTERS + 1), "characters; at most"),
    ],
)
def test_what_is_no_text_is_refused(value: object, why: str) -> None:
    with pytest.raises(RowError, match=f"column `answer`: .*{why}"):
        check_text(value, "answer")
