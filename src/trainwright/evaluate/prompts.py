"""What is put to the model, and to the retriever, about a question.

The model sees the passages with their sources, the question and its choices, numbered from 1 as results are. Nothing of
it reads like an answer: a model that repeats its prompt has not chosen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from trainwright.errors import UserError
from trainwright.evaluate.questions.question import Question
from trainwright.evaluate.retrieval.passages import Passage

FIELDS: Final = ("question", "choices", "passages", "facts", "earlier")
"""What a template may name: `{passages}` are texts with their sources, `{facts}` the texts alone, in a row."""
_FIELD = re.compile(r"\{(\w+)\}")
_WORD = re.compile(r"\w\w+")


def reasoning_prompt(
    question: Question, passages: Sequence[Passage], *, answers: Sequence[object] = (), template: str | None = None
) -> str:
    """Return what asks the model for an answer from the passages; `answers` are those of earlier reasonings.

    A `template` of the user's own names FIELDS in braces.

    Raises:
        UserError: the template names what is no field, or leaves out the question.
    """
    fields = {
        "question": question.text,
        "choices": "\n".join(f"{number}. {choice}" for number, choice in enumerate(question.choices, 1)),
        # Without numbers: a model that names the passage it goes by would seem to name a choice.
        "passages": "\n\n".join(f"From {passage.source}:\n{passage.searched}" for passage in passages),
        "facts": " ".join(passage.text for passage in passages),
        "earlier": ", ".join(dict.fromkeys(str(answer) for answer in answers if answer is not None)),
    }
    if template is None:
        template = _template(choices=bool(fields["choices"]), passages=bool(passages), earlier=bool(fields["earlier"]))
    else:
        check_template(template)
    # In one pass: what a passage says in braces is no field.
    return _FIELD.sub(lambda match: fields[match[1]], template)


def check_template(template: str) -> None:
    """Check a template of the user's own.

    Raises:
        UserError: it names what is no field, or leaves out the question.
    """
    named = _FIELD.findall(template)
    problems = [f"`{{{name}}}` is no field" for name in named if name not in FIELDS]
    if "question" not in named:
        problems.append("`{question}` is not in it")
    if problems:
        fields = ", ".join(f"{{{name}}}" for name in FIELDS)
        raise UserError("the prompt template cannot be used", problems=problems, hints=[f"its fields are {fields}"])


def query(question: Question, *, passages: Sequence[Passage] = (), answers: Sequence[object] = ()) -> str:
    """Return what is searched for next: the question, and of its choices those that are still open; no model is asked.

    Open is a choice of which no passage so far has a word, and one that was answered so far and wants confirming. A
    short-answer question is searched for as it is: a query that stays the same goes on down its ranking. So is one that
    says itself what to search for.
    """
    if question.search is not None:
        return question.search
    known = {word for passage in passages for word in _words(passage.searched)}
    still_open = [
        choice
        for number, choice in enumerate(question.choices, 1)
        if number in answers or known.isdisjoint(_words(choice))
    ]
    return " ".join([question.text, *still_open])


def _template(*, choices: bool, passages: bool, earlier: bool) -> str:
    task = "Choose what answers the question" if choices else "Answer the question in as few words as possible"
    reply = "Reply with its number and nothing else." if choices else "Reply with these words and nothing else."
    parts = [
        f"{task}{', by the passages as far as they help' if passages else ''}. {reply}",
        "Passages:\n\n{passages}" if passages else "",
        "Question: {question}",
        "{choices}" if choices else "",
        "Thought right so far: {earlier}. Check it against the passages." if earlier else "",
        "Answer:",
    ]
    return "\n\n".join(filter(None, parts))


def _words(text: str) -> list[str]:
    """As the retriever cuts them."""
    return _WORD.findall(text.lower())
