"""What is put to the model and to the retriever."""

from __future__ import annotations

import pytest

from trainwright.errors import UserError
from trainwright.evaluate.prompts import query, reasoning_prompt
from trainwright.evaluate.questions.question import Question
from trainwright.evaluate.retrieval.passages import Passage
from trainwright.evaluate.scoring import parse_choice

CHOICES = ("The radio unit", "The distributed unit", "The central unit", "The service management")
ASKED = Question("q", "Which unit hosts the scheduler?", CHOICES, 2)
SHORT = Question("s", "Who sells bread?", (), ("Otto",))
PASSAGES = [
    Passage("a", "a", "Real-time work of layer 2 happens close to the radio.", "o-ran.txt:12"),
    Passage("b", "b", "Timers of {question} are strict.", "o-ran.txt:80"),
]


def test_the_model_sees_passages_with_their_sources_question_and_numbered_choices() -> None:
    """T-19: the retrieved text itself goes into the prompt; choices bear the numbers that results show."""
    prompt = reasoning_prompt(ASKED, PASSAGES)
    for passage in PASSAGES:
        assert f"From {passage.source}:\n{passage.text}" in prompt
    assert prompt.index("o-ran.txt:80") < prompt.index(ASKED.text) < prompt.index("1. The radio unit")
    assert "4. The service management" in prompt
    assert "Passages" not in reasoning_prompt(ASKED, [])


def test_prompts_begin_alike_so_that_their_beginning_is_computed_once() -> None:
    """Issue 6 (prefix reuse)."""
    other = Question("o", "What is xApp?", ("a", "b"), 1)
    assert reasoning_prompt(ASKED, PASSAGES)[:100] == reasoning_prompt(other, PASSAGES[1:])[:100]


@pytest.mark.parametrize("passages", [[], PASSAGES])
@pytest.mark.parametrize("answers", [(), (2, None, 2, 3)])
def test_a_model_that_repeats_its_prompt_has_not_answered(passages: list[Passage], answers: tuple[object, ...]) -> None:
    """T-20: the original's prompt itself was read as an answer."""
    prompt = reasoning_prompt(ASKED, passages, answers=answers)
    assert parse_choice(prompt, CHOICES) is None
    assert all(parse_choice(line, CHOICES) is None for line in prompt.splitlines() if line[:1] not in "1234")


def test_a_prompt_tells_what_was_thought_right_before() -> None:
    """A further reasoning is not the same question again; unparsable answers and repeats are not told."""
    assert "Thought right so far: 2, 3." in reasoning_prompt(ASKED, [], answers=(2, None, 2, 3))
    assert reasoning_prompt(ASKED, [], answers=(None,)) == reasoning_prompt(ASKED, [])


def test_a_short_answer_question_has_no_choices() -> None:
    """It asks for words."""
    prompt = reasoning_prompt(SHORT, PASSAGES)
    assert "number" not in prompt and "Who sells bread?" in prompt


def test_a_template_of_the_users_own_is_filled_in_one_pass() -> None:
    """For a model that was trained on another form; what a passage says in braces stays as it is."""
    facts = [Passage("1", "1", "Otto sells {choices}.", "f:1"), Passage("2", "2", "Mara paints boats.", "f:2")]
    prompt = reasoning_prompt(SHORT, facts, template="Story: {facts}\n{question}")
    assert prompt == "Story: Otto sells {choices}. Mara paints boats.\nWho sells bread?"


def test_a_template_that_names_no_field_is_refused_with_the_fields() -> None:
    """All problems at once."""
    with pytest.raises(UserError) as caught:
        reasoning_prompt(SHORT, [], template="{story} {__class__}")
    text = caught.value.render()
    assert "`{story}`" in text and "`{__class__}`" in text and "`{question}` is not in it" in text
    assert "{passages}" in text


def test_choices_are_searched_for_until_a_passage_has_them() -> None:
    """A subquery is the question with what is still open; an answer that was given wants confirming."""
    assert query(ASKED) == "Which unit hosts the scheduler? " + " ".join(CHOICES)
    plain = Question("q", "Which one?", ("alpha", "beta", "gamma"), 1)
    found = [Passage("a", "a", "Alpha, and also gamma.", "f:1")]
    assert query(plain, passages=found) == "Which one? beta"
    assert query(plain, passages=found, answers=(3,)) == "Which one? beta gamma"


def test_a_short_answer_question_keeps_its_query_so_that_retrieval_goes_on_down_the_ranking() -> None:
    """The driver skips what the same query has brought before."""
    assert query(SHORT) == query(SHORT, passages=PASSAGES, answers=("Otto",)) == "Who sells bread?"
