"""All questions that are open at once advance together: one call of the engine a step, never one question at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trainwright.errors import UserError
from trainwright.evaluate.engines.engine import Engine
from trainwright.evaluate.episode import Episode
from trainwright.evaluate.mdp import Action
from trainwright.evaluate.metrics import Record
from trainwright.evaluate.prompts import query, reasoning_prompt
from trainwright.evaluate.questions.question import Question
from trainwright.evaluate.retrieval.passages import Passage
from trainwright.evaluate.retrieval.retriever import PassageQuery, Retriever


@dataclass(frozen=True)
class Means:
    """What takes a question further."""

    engine: Engine
    retriever: Retriever | None
    passages: int
    """That one retrieval brings."""
    max_new_tokens: int
    prompt_template: str | None = None
    covers: Callable[[Question, Sequence[Passage]], bool] | None = None
    """Whether passages hold what a question needs; None: a retrieval succeeds by bringing anything new."""


@dataclass(eq=False)
class _Open:
    """A question on its way, and since when."""

    episode: Episode
    started_s: float = field(default_factory=time.monotonic)


def drive(
    more: Callable[[int], Sequence[Episode]], means: Means, ended: Callable[[Record], None], *, at_once: int
) -> None:
    """Answer the questions that `more` gives until it gives none while none is open; each goes to `ended` as it ends.

    `more` is called with how many questions there is room for, before each step.

    Raises:
        UserError: a policy retrieves and there is nothing to retrieve from, or the engine cannot answer.
    """
    live: list[_Open] = []
    while True:
        live += [_Open(episode) for episode in more(at_once - len(live))]
        if not live:
            return
        _retrieve(live, means)
        live = _still_open(live, ended)
        _reason(live, means)
        live = _still_open(live, ended)


def _still_open(live: Sequence[_Open], ended: Callable[[Record], None]) -> list[_Open]:
    """Hand on the questions that are answered and return the others."""
    remaining = []
    for one in live:
        if one.episode.next_action() is Action.TERMINATE:
            ended(one.episode.record(seconds=time.monotonic() - one.started_s))
        else:
            remaining.append(one)
    return remaining


def _retrieve(live: Sequence[_Open], means: Means) -> None:
    """Retrieve, for all that want to, until none does."""
    while wanting := [one for one in live if one.episode.next_action() is Action.RETRIEVE]:
        if means.retriever is None:
            raise nothing_to_retrieve(wanting[0].episode.strategy.name)
        searches = [_search(one.episode, means.passages) for one in wanting]
        for one, search, passages in zip(wanting, searches, means.retriever.search(searches), strict=True):
            one.episode = one.episode.retrieved(search.query, passages, success=_success(one.episode, passages, means))


def _success(episode: Episode, retrieved: Sequence[Passage], means: Means) -> bool | None:
    """Return whether a retrieval is the one that brought what was missing; None where that is not looked at."""
    if means.covers is None:
        return None
    before = means.covers(episode.question, episode.passages)
    return not before and means.covers(episode.question, (*episode.passages, *retrieved))


def _search(episode: Episode, k: int) -> PassageQuery:
    known = frozenset(passage.id for passage in episode.passages)
    words = query(episode.question, passages=episode.passages, answers=episode.state.answers)
    return PassageQuery(words, k, known)


def _reason(live: Sequence[_Open], means: Means) -> None:
    if not live:
        return
    prompts = [_prompt(one.episode, means.prompt_template) for one in live]
    answers = means.engine.generate(prompts, max_new_tokens=means.max_new_tokens)
    for one, answer in zip(live, answers, strict=True):
        one.episode = one.episode.reasoned(
            one.episode.question.text, answer.text, confidence=answer.confidence, new_tokens=answer.new_tokens
        )


def _prompt(episode: Episode, template: str | None) -> str:
    return reasoning_prompt(episode.question, episode.passages, answers=episode.state.answers, template=template)


def nothing_to_retrieve(policy: str) -> UserError:
    """Return the error for a policy that retrieves where no corpus is named."""
    return UserError(
        f"the policy {policy} retrieves, and there is nothing to retrieve from",
        hints=["name a corpus: retrieval.corpus=FOLDER", "or take a policy without: no-retrieval, always-reason"],
    )
