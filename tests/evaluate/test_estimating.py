"""The decision process estimated from a calibration split: what the probe's lines tell, and what they cannot."""

from __future__ import annotations

from typing import Any

import pytest

from trainwright.errors import UserError
from trainwright.evaluate.episode import Episode
from trainwright.evaluate.estimating import Estimated, estimate_process
from trainwright.evaluate.mdp import Action, Sigma, preset
from trainwright.evaluate.policy_names import strategy
from trainwright.evaluate.questions.question import Question
from trainwright.evaluate.retrieval.passages import Passage

GUIDE = preset("guide")
PROBE = strategy("probe:3", GUIDE)


def probed(question: Question, *, found_at: int | None, right: dict[bool, str], luck: int = 0) -> dict[str, Any]:
    """The probe's line of one question whose `found_at`th retrieval is the one that succeeds."""
    episode = Episode(question, PROBE, GUIDE, luck)
    while (action := episode.next_action()) is not Action.TERMINATE:
        retrievals = episode.state.retrievals
        if action is Action.RETRIEVE:
            passage = Passage(f"{retrievals}", f"{retrievals}", "text", "file")
            episode = episode.retrieved(question.text, [passage], success=retrievals + 1 == found_at)
        else:
            known = found_at is not None and retrievals >= found_at
            episode = episode.reasoned(question.text, right[known])
    return episode.record()


def estimated(found_at: list[int | None], right: dict[bool, str]) -> Estimated:
    questions = {str(n): Question(str(n), "What does Otto sell?", (), ("bread",)) for n in range(len(found_at))}
    lines = [
        probed(question, found_at=found, right=right)
        for question, found in zip(questions.values(), found_at, strict=True)
    ]
    return estimate_process(lines, questions, GUIDE)


def test_a_corpus_that_answers_at_the_first_success_gives_its_own_parameters() -> None:
    """S3-36, S3-40: p_s by the retrievals that were still needed, delta_r by what success was worth."""
    found = estimated([1, 2, 3, None], {False: "boats", True: "bread"})
    # 1 + 2 + 3 + 3 retrievals until the first success or the end, three of which succeeded.
    assert (found.success.hits, found.success.n) == (3, 9)
    assert found.process.p_s == pytest.approx(1 / 3)
    assert found.process.delta_r == 1.0
    assert found.before.value == 0.0 and found.after.value == 1.0
    assert found.process.sigma is Sigma.LINEAR
    assert (found.process.c_r, found.process.c_p, found.process.mu) == (GUIDE.c_r, GUIDE.c_p, GUIDE.mu)


def test_what_is_known_without_retrieval_is_no_gain_of_it() -> None:
    """S3-36: a model that knows the answer gains nothing, and the best policy then asks once."""
    found = estimated([1, 1, 2], {False: "bread", True: "bread"})
    assert found.before.value == found.after.value == 1.0
    assert found.process.delta_r == found.process.delta_p == pytest.approx(0.01)
    best = strategy("mdp", found.process)
    question = Question("q", "What does Otto sell?", (), ("bread",))
    assert Episode(question, best, GUIDE, 0).next_action() is Action.REASON


def test_the_lines_say_what_is_estimated_and_what_assumed() -> None:
    """S3-40: costs and weights cannot be measured, and the print does not pretend so."""
    lines = "\n".join(estimated([1, 3], {False: "boats", True: "bread"}).lines())
    assert "p_s = 0.50 [" in lines and "(2 of 4)" in lines
    assert "assumed: c_r 0.1, c_p 0.05, mu 0.6, gamma 0.98" in lines


def test_nothing_is_estimated_where_no_retrieval_succeeded() -> None:
    """S3-40: refused with the count and what to do, instead of a made-up gain."""
    with pytest.raises(UserError, match="none of 6 retrievals succeeded") as refused:
        estimated([None, None], {False: "boats", True: "bread"})
    assert any("calibration.questions" in hint for hint in refused.value.hints)
