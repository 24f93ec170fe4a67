"""A worker without a model: answers the questions given to it by their number, and may be killed while it does.

python scoring_worker.py RESULTS WRITER QUESTION...
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from trainwright.evaluate.episode import Episode, luck
from trainwright.evaluate.mdp import PRESETS, Action
from trainwright.evaluate.policy_names import strategy
from trainwright.evaluate.questions.question import Question
from trainwright.evaluate.results import Lines


def answered(name: str) -> dict[str, object]:
    """Return the results line of a question; the "model" is right as its luck has it."""
    asked = Question(name, f"Which is {name}?", ("a", "b", "c", "d"), 1, "easy" if name < "q-10" else "hard")
    episode = Episode(asked, strategy("random", PRESETS["base"]), PRESETS["base"], 42)
    while (action := episode.next_action()) is not Action.TERMINATE:
        if action is Action.RETRIEVE:
            episode = episode.retrieved("query", [], success=episode.coin(0.7))
        else:
            episode = episode.reasoned("query", "1" if luck(42, name, "model", 0) < 0.6 else "no idea")
    return episode.record()


if __name__ == "__main__":
    results, writer, hangs_after, *questions = sys.argv[1:]
    lines = Lines(Path(results))
    for number, name in enumerate(questions, 1):
        lines.append(writer, answered(name))
        if number == int(hangs_after):
            print("hangs", flush=True)
            time.sleep(600)
