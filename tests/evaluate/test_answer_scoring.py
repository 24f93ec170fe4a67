"""What is read from a response, and how it compares with the right answer."""

from __future__ import annotations

import pytest

from trainwright.evaluate.questions.question import Question
from trainwright.evaluate.scoring import f1, normalized, parse_choice, parse_short_answer, score

CHOICES = ("O-CU", "O-DU", "O-RU unit", "RU")


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("2", 2),
        (" 2.\n", 2),
        ("(B)", 2),
        ("**B**", 2),
        ("b)", 2),
        ("2. O-DU", 2),
        ("B: O-DU", 2),
        ("Answer: 2", 2),
        ("**Answer:** 2", 2),
        ("The answer is (C).", 3),
        ("The correct option is 3, because ...", 3),
        ("Option 4 is right.", 4),
        ("答案是C。", 3),
        (r"Thus $\boxed{2}$.", 2),
        (r"Thus \boxed{\text{B}}", 2),
        (r"\boxed{O-DU}", 2),
        ("O-DU", 2),
        ("I am sure that it is the O-DU.", 2),
        ("It is the O-RU unit", 3),
        ("1. First, what is asked. 2. Then the units.\nThe answer is 3", 3),
        ("First I thought the answer is 1. But no: the answer is 2.", 2),
        ("2\n\nQuestion: What else?\nAnswer: 4", 2),
        ("The answer is 2.\nQ: And the next?\nThe answer is 1.", 2),
        ("The answer is B. Option A is wrong, as it is central.", 2),
        ("I would take option (d).", 4),
        ("The answer is a little hard to find; the answer is D", 4),
        ("1) It lies near the antenna", 1),
    ],
)
def test_an_answer_is_read_as_it_was_meant(response: str, number: int) -> None:
    """T-20: a label, "the answer is", a boxed answer or the text of the choice."""
    assert parse_choice(response, CHOICES) == number


@pytest.mark.parametrize(
    "response",
    [
        "",
        "   \n",
        "I do not know.",
        "A distributed system has many parts.",
        "In 2024, 3GPP published 4 releases.",
        "7",
        "Answer: 9",
        "The answer is A or B.",
        "The answer is not clear",
        "The answer is a distributed unit.",
        "The answer is 2.5 GHz.",
        "The answer is 3,000.",
        "Option A or option B.",
        "Either the O-CU or the O-DU.",
        "Question: which one? Options 1-4",
    ],
)
def test_what_names_no_answer_is_unparsable_not_a_guess(response: str) -> None:
    """T-20: the original took the last digit of prompt and output, or 1."""
    assert parse_choice(response, CHOICES) is None
    asked = Question("q", "?", CHOICES, 1)
    assert score(asked, response).unparsable
    assert not score(asked, response).is_correct


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("<think>The answer is 1</think> 4", 4),
        ("<think>\nIs it A?\nThe answer is 1.\n</think>\n\nThe answer is B.", 2),
        ("<thinking>The answer is 1</thinking>2", 2),
        ("<THINK>1</THINK>2", 2),
        ("<think></think>3", 3),
        ("<think>\n\n</think>\n\n(C)", 3),
        ("[THINK]The answer is 1[/THINK]4", 4),
        (r"<think>\boxed{1}</think> \boxed{4}", 4),
        ("<think>Question: which?\nThe answer is 1</think>4", 4),
        ("<think>1</think> First. <think>But the answer is 3</think> The answer is 2", 2),
        ("The answer is 1, or is it?\n</think>\n\n4", 4),
        ("<think>1</think> so 2? </think>4", 4),
        ("<think>The tag <think> opens it; 1</think>4", 4),
        ("<|channel|>analysis<|message|>The answer is 1<|end|><|start|>assistant<|channel|>final<|message|>4", 4),
        ("<|channel|>final<|message|>4<|return|>", 4),
        ("<|channel|>analysis<|message|>1<|end|><|channel|>final <|constrain|>json<|message|>4", 4),
        ("<|channel|>final<|message|>The answer is 2", 2),
        ("analysisThe answer is 1.assistantfinal4", 4),
        ("<think>The answer is 1", None),
        ("<think>The answer is 1.\n2. O-DU", None),
        ("Let me see. <think>The answer is 1", None),
        ("<think>1</think> Hm. <think>The answer is 2", None),
        ("<think>The answer is 1</think>", None),
        ("The answer is 1</think>", None),
        ("<|channel|>analysis<|message|>The answer is 1", None),
        ("<|channel|>analysis<|message|>1<|end|><|start|>assistant<|channel|>commentary<|message|>2", None),
        ("analysisThe answer is 1.", None),
    ],
)
def test_harm_13_thinking_is_no_answer(response: str, number: int | None) -> None:
    """What a model thinks before its answer is left out; cut off inside it, there is no answer to read."""
    assert parse_choice(response, CHOICES) == number
    read = score(Question("q", "?", CHOICES, 1), response)
    assert (read.unparsable, read.is_correct) == (number is None, False)


def test_harm_13_a_short_answer_follows_the_thinking() -> None:
    """No word of the thinking counts, neither for the exact match nor for F1."""
    asked = Question("q", "When?", (), ("1843",))
    assert score(asked, "<think>In 1842? Answer: 1842</think>\n1843").is_correct
    cut_off = score(asked, "<think>Answer: 1843")
    assert (cut_off.predicted, cut_off.is_correct, cut_off.f1) == (None, False, 0.0)


def test_labels_count_as_far_as_there_are_choices() -> None:
    """S3-46: a question with six choices can be answered 6, one with three cannot be answered 4."""
    six = tuple(f"choice number {word}" for word in ("one", "two", "three", "four", "five", "six"))
    assert parse_choice("6", six) == parse_choice("F", six) == 6
    assert parse_choice("4", six[:3]) is None


def test_a_choice_that_is_a_number_is_found_by_its_text() -> None:
    """T-20: 42 is no label here, but it is a choice."""
    assert parse_choice("The answer is 42.", ("41", "42", "43")) == 2


def test_short_answers_are_compared_as_squad_does() -> None:
    """Issue 6, scoring: exact match without articles, case and punctuation; F1 of the words, the best one."""
    assert normalized("The  Eiffel-Tower, a tower!") == "eiffeltower tower"
    assert f1("in the year 1843", "1843") == pytest.approx(0.5)
    assert f1("", "1843") == 0
    asked = Question("q", "When?", (), ("1843", "the year 1843"))
    exact = score(asked, "Answer: The year 1843.\nQuestion: Who?")
    assert (exact.is_correct, exact.f1, exact.predicted) == (True, 1.0, "The year 1843.")
    near = score(asked, "It was in 1843")
    assert not near.is_correct and near.f1 == pytest.approx(0.4)
    assert score(asked, " \n").unparsable
    assert parse_short_answer("The final answer is: **Ada**\nbecause") == "Ada"
