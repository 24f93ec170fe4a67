"""Where a run goes on from, decided once for all ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from trainwright.errors import ExitCode, UserError
from trainwright.launch.resume import choose_start, is_finished
from trainwright.runs import RunFolder
from trainwright.runs.checkpoints import commit, open_staging, seal_file
from trainwright.runs.writing import write_json_atomic

CONTRACT: dict[str, dict[str, Any]] = {
    "geometry": {"ranks": 2},
    "batch": {"train.global_batch_size": 8},
    "schedule": {"train.learning_rate": 1e-3, "train.max_steps": None},
    "fixed": {"data": "a" * 64, "train.seed": 42},
}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run folder with checkpoints of steps 10 and 20."""
    folder = RunFolder(tmp_path / "run")
    save(folder, 10, 20)
    return folder


def save(folder: RunFolder, *steps: int, contract: dict[str, dict[str, Any]] = CONTRACT) -> None:
    folder.create()
    attempt = folder.start_attempt()
    for step in steps:
        weights = open_staging(folder, step, attempt) / "model.safetensors"
        weights.write_bytes(b"weights" * step)
        position = {"step": step, "epoch": 0, "epoch_samples": 8 * step, "samples_seen": 8 * step}
        state = {"position": position}
        commit(folder, step, attempt, {weights.name: seal_file(weights)}, contract=contract, state=state)


def damage(folder: RunFolder, step: int) -> None:
    (folder.checkpoint_dir(step) / "model.safetensors").write_bytes(b"weightz" * step)


def changed(group: str, key: str, value: object) -> dict[str, dict[str, Any]]:
    contract = copy.deepcopy(CONTRACT)
    contract[group][key] = value
    return contract


def test_the_newest_checkpoint_is_taken_and_its_contract_told(folder: RunFolder) -> None:
    """C19, E0: one decision, with the step, the samples seen and the level."""
    start = choose_start(folder, CONTRACT, resume=None, allowed=())
    assert (start.path, start.step) == (folder.checkpoint_dir(20), 20)
    assert "checkpoint-20 (step 20, 160 samples seen)" in start.lines[0]
    assert "exact" in start.lines[1]


def test_a_damaged_newest_is_named_and_the_one_before_it_taken(folder: RunFolder) -> None:
    """C10"""
    damage(folder, 20)
    start = choose_start(folder, CONTRACT, resume=None, allowed=())
    assert start.step == 10
    assert start.lines[0].startswith("Skipped checkpoint-20: model.safetensors")


def test_where_none_is_whole_nothing_is_started_and_all_are_named(folder: RunFolder) -> None:
    """C12: from nothing only with --fresh, which the message names."""
    damage(folder, 10)
    damage(folder, 20)
    with pytest.raises(UserError) as caught:
        choose_start(folder, CONTRACT, resume=None, allowed=())
    assert caught.value.exit_code is ExitCode.NO_VALID_CHECKPOINT
    assert [line.split(":")[0] for line in caught.value.problems] == ["Skipped checkpoint-20", "Skipped checkpoint-10"]
    assert "--fresh" in caught.value.render()


def test_an_empty_folder_starts_from_nothing_unless_a_checkpoint_was_asked_for(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    start = choose_start(folder, CONTRACT, resume=None, allowed=())
    assert (start.path, start.step, start.lines) == (None, 0, ())
    with pytest.raises(UserError, match="there is no checkpoint to resume from") as caught:
        choose_start(folder, CONTRACT, resume="latest", allowed=())
    assert caught.value.exit_code is ExitCode.NO_VALID_CHECKPOINT


def test_a_named_checkpoint_is_taken_or_refused_but_never_replaced(folder: RunFolder, tmp_path: Path) -> None:
    """An older one may be chosen; a damaged one and one of another run are refused with the reason."""
    older = str(folder.checkpoint_dir(10))
    assert choose_start(folder, CONTRACT, resume=older, allowed=()).step == 10
    damage(folder, 10)
    with pytest.raises(UserError, match="does not have the sha256") as caught:
        choose_start(folder, CONTRACT, resume=older, allowed=())
    assert caught.value.exit_code is ExitCode.NO_VALID_CHECKPOINT
    other = RunFolder(tmp_path / "other")
    save(other, 30)
    with pytest.raises(UserError, match="belongs to another run"):
        choose_start(folder, CONTRACT, resume=str(other.checkpoint_dir(30)), allowed=())


def test_a_refusal_names_each_field_with_both_values_and_the_flag_that_would_take_it(folder: RunFolder) -> None:
    """R05, E3: the learning rate can be allowed, the data cannot."""
    with pytest.raises(UserError) as caught:
        choose_start(folder, changed("schedule", "train.learning_rate", 5e-4), resume=None, allowed=())
    assert caught.value.exit_code is ExitCode.USAGE
    assert caught.value.problems == ("train.learning_rate: 0.001 -> 0.0005",)
    assert "--allow train.learning_rate" in caught.value.render()
    with pytest.raises(UserError) as caught:
        choose_start(folder, changed("fixed", "data", "b" * 64), resume=None, allowed=("data",))
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["data"]
    assert "--allow" not in caught.value.render()


@pytest.mark.parametrize(
    ("before", "said", "hint"),
    [
        (None, "data.template: null -> chat", "data.template=none goes on with it"),
        ("plain", "data.template: plain -> chat", "to go on with what the run has learned from: data.template=plain"),
    ],
)
def test_harm_07_other_tokens_of_another_template_are_refused_by_its_name(
    tmp_path: Path, before: str | None, said: str, hint: str
) -> None:
    """A run of a version without templates, or of another one, learns no other tokens unasked; equal ones go on."""
    folder, now = RunFolder(tmp_path / "run"), {**CONTRACT, "template": {"data.template": "chat"}}
    save(folder, 10, contract=CONTRACT if before is None else {**CONTRACT, "template": {"data.template": before}})
    assert choose_start(folder, now, resume=None, allowed=()).step == 10
    now["fixed"] = {**CONTRACT["fixed"], "data": "b" * 64}
    with pytest.raises(UserError) as caught:
        choose_start(folder, now, resume=None, allowed=())
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["data", "data.template"]
    assert caught.value.problems[1] == said
    assert caught.value.hints[0].endswith(hint)


def test_what_was_allowed_is_taken_and_told(folder: RunFolder) -> None:
    """E2"""
    now = changed("schedule", "train.learning_rate", 5e-4)
    start = choose_start(folder, now, resume=None, allowed=("train.learning_rate",))
    assert start.step == 20
    assert "every sample once an epoch" in start.lines[1]
    assert "train.learning_rate: 0.001 -> 0.0005" in start.lines[2]


def test_a_finished_run_is_finished_for_this_job_only(folder: RunFolder) -> None:
    """S07, E3: not for one that was extended, and a different job is refused."""
    assert not is_finished(folder, CONTRACT, ())
    folder.final_model_dir.mkdir()
    write_json_atomic(folder.final_model_dir / "trainwright.json", {"contract": CONTRACT})
    assert is_finished(folder, CONTRACT, ())
    assert is_finished(folder, changed("geometry", "ranks", 1), ())
    longer = changed("schedule", "train.max_steps", 50)
    assert not is_finished(folder, longer, ("train.max_steps",))
    with pytest.raises(UserError, match="the finished run"):
        is_finished(folder, changed("fixed", "train.seed", 7), ())
