"""What a script says of its steps: by `trainwright.report`, or in a log of a common format."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trainwright
from trainwright.launch.own_script.log_formats import read_bar, read_line
from trainwright.launch.own_script.log_reader import LogMetrics
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import read


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    assert folder.start_attempt() == 1
    return folder


@pytest.fixture
def reporting(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """The environment that a rank of attempt 1 gives its script."""
    monkeypatch.setenv("TRAINWRIGHT_RUN_DIR", str(folder.path))
    monkeypatch.setenv("TRAINWRIGHT_ATTEMPT", "1")
    return folder


def recorded(folder: RunFolder, log: str) -> list[dict[str, Any]]:
    """Return the records that reading a log makes, without attempt and kind."""
    folder.rank_log(1, 0).write_bytes(log.encode())
    with LogMetrics(folder, 1) as metrics:
        metrics.follow()
    return [{k: v for k, v in r.items() if k not in ("attempt", "kind")} for r in read(folder.metrics_jsonl)]


def test_report_records_a_step_as_the_built_in_trainer_does(reporting: RunFolder) -> None:
    trainwright.report(step=3, loss=2.5, epoch=0.5, learning_rate=1e-3)
    trainwright.report(step=3, eval_loss=2.0, eval_accuracy=0.5)
    trainwright.report(step=4, loss=float("nan"))
    train, evaluation, overflow = read(reporting.metrics_jsonl)
    assert {key: train[key] for key in ("kind", "attempt", "step", "loss", "epoch", "learning_rate")} == {
        "kind": "train", "attempt": 1, "step": 3, "loss": 2.5, "epoch": 0.5, "learning_rate": 1e-3,
    }  # fmt: skip
    assert (evaluation["kind"], evaluation["loss"], evaluation["accuracy"]) == ("eval", 2.0, 0.5)
    assert overflow["loss"] is None
    assert train["source"] == "trainwright.report"


def test_report_takes_tensors_and_is_silent_outside_a_run_and_in_other_ranks(
    reporting: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tensor:
        def item(self) -> float:
            return 1.5

    trainwright.report(step=1, loss=Tensor())  # type: ignore[arg-type]
    monkeypatch.setenv("RANK", "1")
    trainwright.report(step=2, loss=1.0)
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("TRAINWRIGHT_RUN_DIR")
    trainwright.report(step=3, loss=1.0)
    assert [(record["step"], record["loss"]) for record in read(reporting.metrics_jsonl)] == [(1, 1.5)]


def test_a_full_disk_costs_one_warning_and_no_step(
    reporting: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainwright.reporting, "_warned", False)
    reporting.metrics_jsonl.symlink_to("/dev/full")  # refused as a link is, with an OSError like that of a full disk
    for step in range(3):
        trainwright.report(step=step, loss=1.0)
    assert capsys.readouterr().err.count("warning: trainwright.report") == 1


def test_report_needs_neither_torch_nor_the_schema(reporting: RunFolder) -> None:
    script = (
        "import sys, trainwright; trainwright.report(step=1, loss=2.0); print({'torch', 'pydantic'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", script], env=os.environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    assert [record["loss"] for record in read(reporting.metrics_jsonl)] == [2.0]


TRAINER_5 = (
    "\r  0%|          | 0/20 [00:00<?, ?it/s]\r 45%|####5     | 9/20 [00:01<00:01,  8.1it/s]"
    "\r                                                \r"
    "{'loss': '2.3', 'grad_norm': '1.2', 'learning_rate': '5e-05', 'epoch': '0.5'}\n"
    "\r 50%|#####     | 10/20 [00:01<00:01,  8.0it/s]"
    "\r  0%|          | 0/3 [00:00<?, ?it/s]\r 67%|######6   | 2/3 [00:00<00:00, 11.1it/s]\r"
    "{'eval_loss': '2.1', 'eval_runtime': '0.3', 'epoch': '0.5'}\n"
    "\r 50%|#####     | 10/20 [00:02<00:02,  5.0it/s]"
    "\r100%|##########| 20/20 [00:03<00:00,  8.0it/s]\r"
    "{'train_runtime': '3.0', 'train_loss': '2.2', 'epoch': '1'}\n"
    "\r100%|##########| 20/20 [00:03<00:00,  6.0it/s]\n"
)
"""What transformers 5.23 writes: the dict between two drawings of its bar, an evaluation's bar among them."""


def test_a_trainer_dict_gets_the_step_of_the_bar_that_is_drawn_after_it(folder: RunFolder) -> None:
    found = recorded(folder, TRAINER_5)
    trained = [record for record in found if record.get("loss") == 2.3]
    assert [(record["step"], record["learning_rate"], record["grad_norm"]) for record in trained] == [(10, 5e-5, 1.2)]
    assert trained[0]["source"] == "transformers log"
    evaluated = [record for record in read(folder.metrics_jsonl) if record["kind"] == "eval"]
    assert [(record["step"], record["loss"]) for record in evaluated] == [(10, 2.1)]
    assert not any(record.get("train_loss") for record in found), "the mean over the whole run is no step's"


def test_numbers_of_transformers_4_are_read_alike(folder: RunFolder) -> None:
    log = "{'loss': 1.25, 'learning_rate': 1e-05, 'epoch': 0.1}\n\r 10%|#         | 1/10 [00:01<00:09,  1.0s/it]"
    (record,) = recorded(folder, log)
    assert (record["step"], record["loss"], record["step_s"]) == (1, 1.25, 1.0)


@pytest.mark.parametrize(
    ("line", "step", "figures"),
    [
        ("step 10/100 | epoch 0.5 | loss: 2.31 | lr 1.00e-05 | 0.52 s/step | left 0:01:00", 10,
         {"loss": 2.31, "epoch": 0.5, "learning_rate": 1e-5, "step_s": 0.52}),
        ("Step [1,200/36,875] Epoch [0.05] Loss: 2.3456, LR: 1.00e-06, 1.23s/step, ETA 2:00:00", 1200,
         {"loss": 2.3456, "epoch": 0.05, "learning_rate": 1e-6, "step_s": 1.23}),
        ("2026-11-21 10:00:00 INFO step=7 train_loss=0.5 val_loss=0.75", 7, {"loss": 0.5, "eval_loss": 0.75}),
        ("global_step: 5, loss: nan", 5, {"loss": float("nan")}),
        ("step 3 loss 1.5 4.0 steps/s", 3, {"loss": 1.5, "step_s": 0.25}),
        ('{"step": 4, "loss": 2.0, "lr": 0.1}', 4, {"loss": 2.0, "lr": 0.1}),
        # The built-in trainer's own line (S1-41).
        ("step 3/10  epoch 0.30  loss 2.1000  lr 0.001  1,234 tokens/s  0.100 s/step  memory 0.50 GiB  left 0:00:10",
         3, {"loss": 2.1, "epoch": 0.3, "learning_rate": 0.001, "step_s": 0.1}),
    ],
)  # fmt: skip
def test_lines_of_steps_are_read(line: str, step: int, figures: dict[str, float]) -> None:
    """S1-41 and what comes near it."""
    found = read_line(line)
    assert found is not None
    assert found.step == step
    assert dict(found.values) == pytest.approx(figures, nan_ok=True)


@pytest.mark.parametrize(
    "line",
    [
        "loading step 3 of the recipe",
        "{'epoch': 1.0}",
        "['loss', 3]",
        "loss functions are defined in step.py",
        "{" * 5000,
        '{"loss": "' + "9" * 3000 + '"}',
        "Number of processes: 2",
        "step 3: no loss of generality",
    ],
)
def test_other_lines_are_left_alone(line: str) -> None:
    found = read_line(line)
    assert found is None or found.step is None


@pytest.mark.parametrize(
    "text", ["Map: 100%|####| 500/500 [00:01<00:00, 499.0 examples/s]", "Loading weights: 50%|##  | 5/10 [00:00<00:00]"]
)
def test_bars_of_other_work_are_not_steps(text: str) -> None:
    assert read_bar(text) is None


def test_a_bar_for_each_epoch_is_counted_on_and_its_postfix_is_read(folder: RunFolder) -> None:
    """Lightning's way; a bar that is drawn again at the same step is one record."""
    drawn = [
        f"\rEpoch {epoch}: {25 * n}%|###| {n}/4 [00:0{n}<00:03,  2.00it/s, loss={5 - epoch - n / 10:.2f}, v_num=1]"
        for epoch in range(2)
        for n in (1, 2, 2, 3, 4)
    ]
    found = recorded(folder, "".join(drawn) + "\n")
    assert [record["step"] for record in found] == list(range(1, 9))
    assert found[0]["loss"] == 4.9 and found[-1]["loss"] == 3.6
    assert {record["step_s"] for record in found} == {0.5}


def test_figures_without_a_step_are_not_given_one(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert recorded(folder, "{'loss': 1.0, 'epoch': 0.1}\n" * 3) == []
    assert capsys.readouterr().err.count("call trainwright.report") == 1


def test_a_script_that_reports_is_not_read_twice(reporting: RunFolder) -> None:
    trainwright.report(step=1, loss=1.0)
    found = recorded(reporting, "step 1/2 loss 1.0\nstep 2/2 loss 0.5\n")
    assert [record["source"] for record in found] == ["trainwright.report"]


def test_half_a_line_waits_for_the_rest_and_hostile_output_is_harmless(folder: RunFolder) -> None:
    log = folder.rank_log(1, 0)
    log.write_bytes(b"\x1b[31mstep 1/9 loss 1.0\x1b[0m\n\xff\xfe\x00{'__import__': 1}\nstep 2/9 lo")
    with LogMetrics(folder, 1) as metrics:
        metrics.follow()
        assert [record["step"] for record in read(folder.metrics_jsonl)] == [1]
        with log.open("ab") as file:
            file.write(b"ss 0.5\n")
        metrics.follow()
    assert [(record["step"], record["loss"]) for record in read(folder.metrics_jsonl)] == [(1, 1.0), (2, 0.5)]
    assert json.loads(folder.metrics_jsonl.read_text().splitlines()[0])["source"] == "step line"
