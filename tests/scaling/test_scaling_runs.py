"""Real short runs of a tiny job: what is told is what the ranks recorded, and nothing is left behind."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median

import pytest

from trainwright.cli import main
from trainwright.errors import ExitCode
from trainwright.runs import index
from trainwright.runs.records import read
from trainwright.scaling.trial import WARM_UP_STEPS

TINY_LLAMA = {
    "architecture": "llama",
    "dimensions": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    },
}
SAMPLES = 12
"""More than the global batch of 8, fewer than the 16 of weak scaling on two ranks."""
STEPS = 10


@pytest.fixture
def job(tmp_path: Path) -> Path:
    rows = [{"question": f"Question {number}?", "answer": f"It is {number}."} for number in range(SAMPLES)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "name": "run",
        "output_dir": str(tmp_path / "runs"),
        "model": {"from_scratch": TINY_LLAMA, "tokenizer": {"vocab_size": 300}},
        "data": {"path": str(tmp_path / "rows.jsonl"), "max_length": 32, "cache_dir": str(tmp_path / "cache")},
        "train": {"global_batch_size": 8},
        "checkpoint": {"every": "1 steps"},
        "resources": {"device": "cpu", "precision": "fp32", "balance": "off"},
    }
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(content))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", ["trainwright", "scaling", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


def test_figures_are_those_of_the_steps_and_nothing_is_left_behind(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 5: two gloo ranks; weak scaling has too few samples there, which costs its row alone."""
    places, kept, listed = [], tmp_path / "kept", index.known()

    class Kept(tempfile.TemporaryDirectory[str]):
        """The command's own folder, of which there is a copy when it has removed it."""

        def cleanup(self) -> None:
            places.append(Path(self.name))
            shutil.copytree(self.name, kept, symlinks=True)
            super().cleanup()

    monkeypatch.setattr(tempfile, "TemporaryDirectory", Kept)
    before = {path.name for path in tmp_path.iterdir()}
    plot = tmp_path / "scaling.svg"
    code = run(monkeypatch, str(job), "--gpus", "1,2", "--steps", str(STEPS), "--plot", str(plot), "--json")
    streams = capsys.readouterr()
    assert code == ExitCode.DONE, streams.err
    document = json.loads(streams.out)

    tried = [(run["count"], run["modes"], run["measured"] is not None) for run in document["runs"]]
    assert tried == [(1, ["weak", "strong"], True), (2, ["weak"], False), (2, ["strong"], True)]
    [why] = document["curves"]["weak"]["not_measured"].values()
    assert why == "12 samples do not fill one batch of train.global_batch_size=16"

    attempts = {1: 1, 2: 3}
    strong = document["curves"]["strong"]["points"]
    assert [point["count"] for point in strong] == [1, 2]
    for point in strong:
        steps = [
            record for record in read(kept / "run" / "metrics.jsonl") if record["attempt"] == attempts[point["count"]]
        ]
        measured = [record for record in steps if record["step"] > WARM_UP_STEPS]
        assert len(measured) >= STEPS and steps[0]["step"] == 1
        whole = [record["samples_seen"] == 8 * record["step"] for record in steps]
        assert all(whole), "a smaller batch at the end of an epoch would pass for a faster step"
        told = point["measured"]
        step_s = median(record["step_s"] for record in measured)
        assert told["step_s"]["median"] == pytest.approx(step_s)
        assert told["samples_per_s"]["median"] == pytest.approx(8 / step_s)
        assert told["tokens_per_s"]["median"] == pytest.approx(median(record["tokens_per_s"] for record in measured))
        assert told["sections_s"].keys() == {"data", "forward", "backward", "communication", "optimizer"}
        # Between two moments of the same steps: the parts are about the whole.
        assert 0 < sum(told["sections_s"].values()) < 10 * fmean(record["step_s"] for record in measured)
    one, two = (point["measured"] for point in strong)
    assert two["sections_s"]["communication"] > 0
    ratio = one["step_s"]["median"] / two["step_s"]["median"]
    assert two["speed_up"] == pytest.approx(ratio)
    assert two["overhead_pct"] == pytest.approx(100 * (1 - ratio / 2))
    assert [len(run["measured"]["sections_s_by_rank"]) for run in document["runs"] if run["measured"]] == [1, 2]

    assert {path.name for path in tmp_path.iterdir()} == before | {"cache", "kept", "scaling.svg"}
    assert index.known() == listed, "what is only measured is no run"
    assert places and not any(place.exists() for place in places)
    assert not list(kept.glob("run/checkpoint-*")) and not (kept / "run" / "final_model").exists()


def test_a_run_that_takes_too_long_is_ended(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 5: a hard time-out for each count; ranks need longer than a second to begin."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = run(monkeypatch, str(job), "--gpus", "1,2", "--mode", "strong", "--timeout", "1")
    said = capsys.readouterr().err
    assert code == ExitCode.FAILED
    assert "1 rank: timed out: 0 of 25 steps in 1 s" in said and "2 ranks: timed out: 0 of 25 steps in 1 s" in said
    assert not list(tmp_path.glob("trainwright-scaling-*")) and not (tmp_path / "runs").exists()
