"""What the demo ends with, by how many answers were right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainwright.demo import tour
from trainwright.demo.files import DemoFolder
from trainwright.demo.tour import Answer, exact_match
from trainwright.errors import ExitCode


@pytest.mark.parametrize(("right", "expected"), [(159, ExitCode.FAILED), (160, ExitCode.DONE)])
def test_the_exit_code_says_whether_the_model_learned(
    right: int,
    expected: ExitCode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Training and model are left out here: the answers are the test's, `right` of 200 good with the story."""

    def ask(folder: DemoFolder, stop: object) -> ExitCode:
        rows = [json.loads(line) for line in folder.questions.read_text().splitlines()]
        for number, row in enumerate(rows):
            row["answer"] = row["right_answer"] if number < right else "Nobody knows."
        folder.answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return ExitCode.DONE

    monkeypatch.setattr(tour, "_train_with_a_stop", lambda folder, stop: ExitCode.DONE)
    monkeypatch.setattr(tour, "_ask", ask)
    assert tour.run_demo(tmp_path, seed=1) is expected
    printed = capsys.readouterr()
    assert f"exact match with the story:     {right / 200:.3f}" in printed.out
    assert ("did not learn" in printed.err) == (expected is ExitCode.FAILED)
    assert ("What to try next" in printed.err) == (expected is ExitCode.DONE)


def test_exact_match_counts_only_the_very_answer_and_only_its_own_half() -> None:
    def answer(story: str | None, said: str) -> Answer:
        return Answer(story, "What do we know of Otto?", "Otto sells bread.", said)

    answers = [
        answer("a", "Otto sells bread."),
        answer("a", "Otto sells bread"),
        answer("a", "Otto sells bread. Otto"),
        answer("a", ""),
        answer(None, "Otto paints boats."),
    ]
    assert exact_match(answers, with_story=True) == 0.25
    assert exact_match(answers, with_story=False) == 0.0
