"""Policies as they are spelled, and as they lead a question to its answer."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from trainwright.errors import ExitCode, UserError
from trainwright.evaluate.episode import Episode
from trainwright.evaluate.expectation import expect
from trainwright.evaluate.mdp import PRESETS, Action
from trainwright.evaluate.policies import State
from trainwright.evaluate.policy_names import strategy
from trainwright.evaluate.questions.question import Question
from trainwright.evaluate.retrieval.passages import Passage

GUIDE = PRESETS["guide"]
solved = functools.cache(strategy)


def question(number: int = 1) -> Question:
    return Question(f"q-{number}", "Which one?", ("north", "south", "east", "west"), 2, "easy")


def run(name: str, asked: Question, *, seed: int = 42, answers: tuple[str, ...] = ("2",)) -> Episode:
    """Lead a question to its end; a retrieval succeeds by the question's own luck, `answers` come round and round."""
    episode = Episode(asked, solved(name, GUIDE), GUIDE, seed)
    while (action := episode.next_action()) is not Action.TERMINATE:
        if action is Action.RETRIEVE:
            episode = episode.retrieved("query", [], success=episode.coin(GUIDE.p_s))
        else:
            episode = episode.reasoned("query", answers[episode.state.reasons % len(answers)])
    return episode


@pytest.mark.parametrize(
    ("name", "retrievals", "reasons"),
    [("fixed:3", 3, 1), ("fixed:0", 0, 1), ("no-retrieval", 0, 1), ("always-reason", 0, 11)],
)
def test_fixed_policies_do_what_their_name_says(name: str, retrievals: int, reasons: int) -> None:
    """S3-21, S3-43: Fixed(k) costs k c_r + c_p in k + 1 iterations."""
    record = run(name, question()).record()
    assert (record["num_retrievals"], record["num_reasons"]) == (retrievals, reasons)
    assert record["iterations"] == retrievals + reasons
    assert record["total_cost"] == pytest.approx(0.10 * retrievals + 0.05 * reasons)


@pytest.mark.parametrize("name", ["always-retrieve", "threshold:0.8", "mdp:head"])
def test_a_policy_that_would_stop_without_an_answer_reasons_once(name: str) -> None:
    """T-21, S3-43."""
    episode = run(name, question())
    assert [step.action for step in episode.steps].count("reason") == 1
    assert episode.steps[-1].action == "reason"


def test_the_number_of_actions_is_capped_and_the_last_one_answers() -> None:
    """S3-39, T-21: where no retrieval ever succeeds, the hundredth action is the one that answers."""
    always = strategy("always-retrieve", GUIDE)
    assert always.next_action(State(u=0, retrievals=98)) is Action.RETRIEVE
    assert always.next_action(State(u=0, retrievals=99)) is Action.REASON
    assert always.next_action(State(u=0, retrievals=99, reasons=1)) is Action.TERMINATE


@pytest.mark.parametrize("name", ["thresholds", "mdp", "random", "fixed:2", "threshold:0.5,0.9", "always-retrieve"])
def test_expected_costs_are_those_of_a_simulation(name: str) -> None:
    """S3-22, S3-41: 2,000 questions, within four standard errors of what was computed."""
    episodes = [run(name, question(number)) for number in range(2000)]
    expected = expect(strategy(name, GUIDE), draws=(0.25, 0.75))
    for found, wanted in (
        ([episode.steps[-1].cost for episode in episodes], expected.cost),
        ([float(len(episode.steps)) for episode in episodes], expected.iterations),
    ):
        mean = sum(found) / len(found)
        variance = sum((value - mean) ** 2 for value in found) / len(found)
        assert abs(mean - wanted) <= 4 * (variance / len(found)) ** 0.5 + 1e-9


def test_luck_belongs_to_the_question_alone() -> None:
    """T-24: neither the order of questions nor another policy's run changes what a random policy does."""
    forwards = {number: run("random", question(number)).steps for number in range(30)}
    run("mdp", question(7))
    backwards = {number: run("random", question(number)).steps for number in reversed(range(30))}
    assert forwards == backwards
    assert len({tuple(step.action for step in steps) for steps in forwards.values()}) > 5
    assert any(run("random", question(number), seed=43).steps != forwards[number] for number in range(30))


def test_every_policy_meets_the_same_luck() -> None:
    """T-24: the second retrieval of a question fails or succeeds for Fixed(2) as it does for Fixed(5)."""
    for number in range(50):
        two = [step.retrieval_success for step in run("fixed:2", question(number)).steps[:2]]
        five = [step.retrieval_success for step in run("fixed:5", question(number)).steps[:2]]
        assert two == five


def test_a_policy_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3-43: by module:Class; it sees the answers so far, and may name actions in words."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    episode = run("always_sure:UntilTwoAgree", question(), answers=("1", "2", "2"))
    assert [step.action for step in episode.steps] == ["retrieve", "reason", "reason", "reason"]
    assert episode.record()["predicted"] == 2
    with pytest.raises(UserError, match="answered 'guess'"):
        run("always_sure:Confused", question())
    with pytest.raises(UserError, match="no class NotAPolicy"):
        strategy("always_sure:NotAPolicy", GUIDE)
    with pytest.raises(UserError, match="no module no_such_module") as missing:
        strategy("no_such_module:Policy", GUIDE)
    assert missing.value.exit_code is ExitCode.MISSING


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fixed", "fixed:3"),
        ("fixed:-1", "fixed:3"),
        ("threshold:1.5", "[0, 1]"),
        ("threshold:0.9,0.5", "ascend"),
        ("threshold:nan", "[0, 1]"),
        ("random:3", "takes no parameter"),
        ("mdp:nothing", "guide, base, spec"),
        ("allways-reason", "did you mean always-reason?"),
    ],
)
def test_a_misspelled_policy_is_answered_with_what_there_is(name: str, said: str) -> None:
    """S3-43."""
    with pytest.raises(UserError) as refusal:
        strategy(name, GUIDE)
    assert said in refusal.value.render()


def test_a_parameter_set_decides_and_the_run_sets_the_price() -> None:
    """S3-40: `mdp:spec` acts as its set says, but pays what every other policy of the run pays."""
    record = run("mdp:spec", question()).record()
    assert record["total_cost"] == pytest.approx(0.10 * record["num_retrievals"] + 0.05 * record["num_reasons"])


def test_the_history_of_a_question_has_the_keys_of_the_guide() -> None:
    """S3-26: keys and values of a retrieval and a reasoning."""
    passage = Passage("doc#2", "doc", "South it is.", "doc.txt#2")
    asked = Question("q", "Which one?", ("north", "south"), 2, None, ("doc",))
    episode = Episode(asked, strategy("fixed:2", GUIDE), GUIDE, 0)
    episode = episode.retrieved("where", [passage]).retrieved("where", [passage])
    episode = episode.reasoned("where", "Answer: 2", confidence=0.9, new_tokens=4)
    record = episode.record(seconds=1.5)
    first, second, last = record["history"]
    assert list(first) == [
        "iteration", "action", "subquery", "retrieved_docs", "retrieval_success", "response", "intermediate_answer",
        "confidence", "uncertainty", "cost", "U_before", "U_after",
    ]  # fmt: skip
    assert first["retrieved_docs"] == ({"id": "doc#2", "source": "doc.txt#2"},)
    assert (first["retrieval_success"], first["U_after"], first["uncertainty"]) == (True, 0.25, 0.75)
    assert (second["retrieval_success"], second["U_after"]) == (False, 0.25), "it brought nothing new"
    assert (last["intermediate_answer"], last["confidence"], last["cost"]) == (2, 0.9, 0.25)
    assert (last["U_before"], last["U_after"]) == (0.25, 0.33)
    assert list(record)[:9] == [
        "question_id", "predicted", "correct", "is_correct", "iterations", "num_retrievals", "num_reasons",
        "total_cost", "history",
    ]  # fmt: skip
    assert (record["predicted"], record["correct"], record["is_correct"]) == (2, 2, True)
    assert (record["gold_retrieved"], record["new_tokens"], record["seconds"]) == (True, 4, 1.5)
