"""The frontier: the decision process at several weights of cost, with the other policies, in figures and as a plot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from evaluations import QUESTIONS, results, run, write_benchmark

from trainwright.cli.eval import with_lists
from trainwright.errors import ExitCode, UserError
from trainwright.evaluate.eval_config import load_evaluation
from trainwright.evaluate.frontier import with_frontier
from trainwright.evaluate.mdp import PRESETS
from trainwright.evaluate.policy_names import strategy

GUIDE = PRESETS["guide"]


def test_accuracy_is_told_against_cost_with_or_without_the_plot(tmp_path: Path) -> None:
    """Issue 6, scoring: one point a policy over the same questions, as measured; the plot hangs on matplotlib alone."""
    write_benchmark(tmp_path)
    asked = ("eval.yaml", "--compare", "fixed:1", "no-retrieval", "--frontier", "0.1,4")
    done = run(tmp_path, *asked)
    assert done.returncode == ExitCode.DONE, done.stderr
    document = results(tmp_path)
    points = document["frontier"]
    assert [(point["policy"], point["mu"]) for point in points] == [
        ("mdp:mu=0.1", 0.1), ("mdp:mu=4", 4.0), ("fixed:1", None), ("no-retrieval", None)
    ]  # fmt: skip
    eager, stingy, fixed, without = points
    assert eager["avg_cost"] > stingy["avg_cost"]
    assert fixed["accuracy"] == document["fixed_strategy"]["accuracy"] == 1.0
    assert fixed["avg_cost"] == pytest.approx(0.15)
    assert without["low"] < without["accuracy"] < without["high"] < fixed["low"]
    lines = done.stdout.splitlines()
    table = lines[lines.index("FRONTIER") + 1 :]
    assert [line.split()[0] for line in table] == ["Policy", *(point["policy"] for point in points)]
    [png] = (tmp_path / "results").glob("*/*.frontier.png")
    [svg] = (tmp_path / "results").glob("*/*.frontier.svg")
    assert png.read_bytes().startswith(b"\x89PNG") and svg.read_text().rstrip().endswith("</svg>")
    assert png.name == f"reader-7B_mixed_{QUESTIONS}q_mdp_mu0.1_vs_mdp_mu4_vs_fixed_k1_vs_no_retrieval.frontier.png"

    png.unlink()
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(__name__)\n")
    again = run(tmp_path, *asked, "--json")
    assert again.returncode == ExitCode.DONE, again.stderr
    assert (
        "no plot: the plot needs matplotlib, which is not installed (pip install 'trainwright[report]')" in again.stderr
    )
    assert json.loads(again.stdout)["frontier"] == points
    assert not png.exists()


def test_a_weight_of_cost_is_spelled_with_the_policy() -> None:
    """Issue 6, scoring: the run's own process at another mu, and nothing else of it changed."""
    dear = strategy("mdp:mu=2.5", GUIDE)
    assert dear.process.mu == 2.5
    assert dear.process.delta_r == GUIDE.delta_r
    assert dear.solution is not None and dear.solution.value(0) < strategy("mdp", GUIDE).solution.value(0)  # type: ignore[union-attr]
    for name, words in (("mdp:mu=much", "write a number"), ("mdp:mu=-1", "mu is -1.0"), ("mdp:mu=nan", "mu is nan")):
        with pytest.raises(UserError) as refusal:
            strategy(name, GUIDE)
        assert words in refusal.value.render()


def test_the_weights_join_the_policies_that_are_asked() -> None:
    """Issue 6: beside those named, or beside the guide's fixed one; each once."""
    asked = load_evaluation(None, ["data=x", "policies=[mdp, mdp:mu=1]"])
    assert with_frontier(asked, ["0.5", "1", "0.5"]).policies == ["mdp:mu=0.5", "mdp", "mdp:mu=1"]
    assert with_frontier(load_evaluation(None, ["data=x"]), ["1"]).policies == ["mdp:mu=1", "fixed:3"]


@pytest.mark.parametrize(
    ("given", "spelled"),
    [
        ("--frontier", ["--frontier="]),
        ("--frontier 0.1 2 seed=3", ["--frontier=0.1", "--frontier=2", "seed=3"]),
        ("--compare mdp:mu=2 fixed:1 seed=3", ["--compare=mdp:mu=2", "--compare=fixed:1", "seed=3"]),
        ("--compare mdp engine=mine:Engine", ["--compare=mdp", "engine=mine:Engine"]),
    ],
)
def test_lists_end_where_another_argument_begins(given: str, spelled: list[str]) -> None:
    """S3-04: a policy may hold `=`, and an override is still an override."""
    assert with_lists(["eval", *given.split()]) == ["eval", *spelled]
