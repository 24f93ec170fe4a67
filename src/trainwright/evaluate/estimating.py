"""The parameters of the decision process, estimated from questions that are set aside, instead of assumed.

The probe asks for an answer before the first retrieval and after each one. How often a retrieval succeeded while none
had before is p_s; how much more often the answer was right after the first success is delta_r; how much more often it
was right when the model was merely asked again is delta_p. U is then accuracy gained, so its worth is linear. Costs, mu
and gamma are the user's: no measurement can know them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.errors import UserError
from trainwright.evaluate.mdp import SMALLEST_STEP, Action, DecisionProcess, Sigma
from trainwright.evaluate.metrics import Record
from trainwright.evaluate.questions.question import Question
from trainwright.evaluate.scoring import score
from trainwright.evaluate.statistics import wilson


@dataclass(frozen=True)
class Share:
    """How often something happened."""

    hits: int
    n: int

    @property
    def value(self) -> float:
        return self.hits / self.n if self.n else 0.0

    def __str__(self) -> str:
        low, high = wilson(self.hits, self.n)
        return f"{self.value:.2f} [{low:.2f}, {high:.2f}] ({self.hits} of {self.n})"


@dataclass(frozen=True)
class Estimated:
    """A process with what it was estimated from."""

    process: DecisionProcess
    questions: int
    success: Share
    """Retrievals that succeeded, of those up to the first success."""
    before: Share
    """Right answers while no retrieval had succeeded."""
    after: Share
    """Right answers after exactly one had."""
    again: float
    """Mean change when the model was asked again and nothing new was known."""

    def lines(self) -> list[str]:
        """Return what was found, a line each."""
        made = self.process
        return [
            f"decision process, estimated from {self.questions} questions that are not asked again:",
            f"  p_s = {self.success} retrievals succeeded where none had before",
            f"  delta_r = {made.delta_r:.2f}: right before any success {self.before}, after one {self.after}",
            f"  delta_p = {made.delta_p:.2f}: right {self.again:+.2f} more often when asked again",
            f"  assumed: c_r {made.c_r:g}, c_p {made.c_p:g}, mu {made.mu:g}, gamma {made.gamma:g}; sigma is linear",
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers."""
        return dataclasses.asdict(self)


def estimate_process(
    records: Sequence[Record], questions: Mapping[str, Question], assumed: DecisionProcess
) -> Estimated:
    """Return the process that the probe's results lines tell of; `assumed` gives costs, mu, gamma and shaping.

    Raises:
        UserError: no retrieval succeeded, so that no gain can be told.
    """
    courses = [_course(record, questions[record["question_id"]]) for record in records]
    success = _share(one for record in records for one in _until_success(record))
    before = _share(right for course in courses for successes, right in course if successes == 0)
    after = _share(right for course in courses for successes, right in course if successes == 1)
    if not success.hits or not after.n:
        raise UserError(
            f"the decision process cannot be estimated: none of {success.n} retrievals succeeded",
            hints=["set more questions aside: calibration.questions", "look at the corpus and at retrieval.success"],
        )
    again = _gain_of_asking_again(courses)
    process = dataclasses.replace(
        assumed,
        p_s=success.value,
        delta_r=_step(after.value - before.value),
        delta_p=_step(again),
        sigma=Sigma.LINEAR,
    )
    return Estimated(process, len(records), success, before, after, again)


def _course(record: Record, question: Question) -> list[tuple[int, bool]]:
    """Return, of each reasoning, how many retrievals had succeeded before it and whether it was right."""
    successes, course = 0, []
    for step in record["history"]:
        if step["action"] == Action.RETRIEVE:
            successes += bool(step["retrieval_success"])
        else:
            course.append((successes, score(question, step["response"]).is_correct))
    return course


def _gain_of_asking_again(courses: Iterable[Sequence[tuple[int, bool]]]) -> float:
    """Return the mean change from one reasoning to the next where no retrieval succeeded in between."""
    changes = [
        is_right - was_right
        for course in courses
        for (known, was_right), (known_now, is_right) in itertools.pairwise(course)
        if known == known_now
    ]
    return sum(changes) / len(changes) if changes else 0.0


def _until_success(record: Record) -> Iterator[bool]:
    """Yield of each retrieval whether it succeeded; what comes after a success is another state of the process."""
    for step in record["history"]:
        if step["action"] == Action.RETRIEVE:
            yield bool(step["retrieval_success"])
            if step["retrieval_success"]:
                return


def _share(outcomes: Iterable[bool]) -> Share:
    counted = list(outcomes)
    return Share(sum(counted), len(counted))


def _step(gain: float) -> float:
    """A gain as the process takes it; where there is none, the smallest step that it knows."""
    return min(1.0, max(SMALLEST_STEP, gain))
