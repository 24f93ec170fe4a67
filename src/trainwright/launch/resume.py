"""Where a run goes on from: decided once, before any rank starts, so that no two ranks can see it differently."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trainwright.errors import ExitCode, UserError
from trainwright.job.batch_schedule import Position
from trainwright.launch.contract import TEMPLATE, FieldDifference, Level, Verdict, compare
from trainwright.runs.checkpoints import CorruptCheckpoint, Manifest, newest_valid, verify
from trainwright.runs.folder import RunFolder
from trainwright.runs.manifest import MANIFEST_NAME
from trainwright.runs.values import number, whole
from trainwright.runs.writing import read_json


@dataclass(frozen=True)
class Start:
    """Where an attempt begins: at a checkpoint, or from nothing (`path` None); `lines` say so to the user."""

    path: Path | None
    step: int
    lines: tuple[str, ...]


def finished_record(folder: RunFolder) -> dict[str, Any] | None:
    """Return what the end of the run left beside the final model, None while it has not ended.

    Raises:
        UserError: it is damaged.
    """
    path = folder.final_model_dir / "trainwright.json"
    if not path.exists():
        return None
    record = read_json(path)
    contract = record.get("contract") if isinstance(record, dict) else None
    if not isinstance(contract, dict) or not all(isinstance(group, dict) for group in contract.values()):
        raise UserError(
            f"{path} does not say what the finished run was",
            hints=["`--fresh` starts again from nothing; the old folder is kept under another name"],
        )
    return dict(record)


def is_finished(folder: RunFolder, contract: Mapping[str, Any], allowed: Collection[str]) -> bool:
    """Say whether the run has reached the end of this very job.

    Raises:
        UserError: it ended as another job; the fields that differ are named.
    """
    record = finished_record(folder)
    if record is None:
        return False
    verdict = compare(record["contract"], contract, allowed)
    if verdict.level is Level.REFUSED:
        raise _refusal("the finished run", folder, verdict)
    return verdict.level in (Level.EXACT, Level.SAME_STEPS, Level.OTHER_FILES)


def choose_start(
    folder: RunFolder, contract: Mapping[str, Any], *, resume: str | None, allowed: Collection[str]
) -> Start:
    """Return where to begin.

    `resume` is None (the newest whole checkpoint if there is one), `latest` (there must be one) or a path.

    Raises:
        UserError: the contract is not met, the named checkpoint is damaged, or none of those there is whole.
    """
    path, manifest, lines = _checkpoint(folder, resume)
    if path is None or manifest is None:
        return Start(None, 0, tuple(lines))
    verdict = compare(manifest.contract, contract, allowed)
    if verdict.level is Level.REFUSED:
        raise _refusal(path.name, folder, verdict)
    seen = manifest.state["position"]["samples_seen"]
    lines.append(f"Resuming from {path.name} (step {manifest.step:,}, {seen:,} samples seen)")
    lines.append(f"Contract: {verdict.level.value}")
    lines += [f"  {difference}" for difference in verdict.differences]
    if verdict.uncompared:
        files = ", ".join(verdict.uncompared)
        lines.append(f"  not compared: the files of {files} (no hash of them was kept, or they are not here now)")
        lines.append("  so the contract holds if they are unchanged")
    return Start(path, manifest.step, tuple(lines))


def _checkpoint(folder: RunFolder, resume: str | None) -> tuple[Path | None, Manifest | None, list[str]]:
    if resume is not None and resume != "latest":
        path = Path(resume)
        try:
            named = verify(path, folder.run_id)
            _require_state(named)
            return path, named, []
        except CorruptCheckpoint as error:
            raise UserError(
                f"{path} cannot be resumed from: {error.reason}",
                hints=["`--resume` without a path takes the newest whole checkpoint"],
                exit_code=ExitCode.NO_VALID_CHECKPOINT,
            ) from error
    found, manifest, skipped = newest_valid(folder, _require_state)
    lines = [f"Skipped {entry.path.name}: {entry.reason}" for entry in skipped]
    if found is None and (skipped or resume == "latest"):
        what = "no checkpoint is whole" if skipped else "there is no checkpoint to resume from"
        raise UserError(
            f"{what} in {folder.path}",
            problems=lines,
            hints=["`--fresh` starts again from nothing; the old folder is kept under another name"],
            exit_code=ExitCode.NO_VALID_CHECKPOINT,
        )
    return found, manifest, lines


def _require_state(manifest: Manifest) -> None:
    """Refuse a manifest that is whole and holds nonsense where a run would go on from."""
    state = manifest.state
    sound = (
        _is_position(state.get("position"))
        and _is_best(state.get("best"))
        and _are_shares(state.get("rank_samples"))
        and isinstance(state.get("scalars", {}), dict)
        and all(isinstance(group, dict) for group in manifest.contract.values())
    )
    if not sound:
        raise CorruptCheckpoint(f"{MANIFEST_NAME} does not say where the run stood, or under what contract")


def _is_position(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    counts = [whole(value, field.name) for field in fields(Position)]
    return all(count is not None and count >= 0 for count in counts)


def _is_best(value: object) -> bool:
    if not isinstance(value, dict):
        return value is None
    return whole(value, "step") is not None and number(value, "eval_loss") is not None


def _are_shares(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(type(share) is int and share >= 0 for share in value))


def _refusal(what: str, folder: RunFolder, verdict: Verdict) -> UserError:
    return UserError(
        f"{what} in {folder.path} was made by a different job",
        problems=[str(difference) for difference in verdict.refused],
        hints=[
            *_consent_hints(verdict.refused),
            *_data_hints(verdict.refused),
            "undo the change, or give the run another `name`",
            "`--fresh` starts again from nothing; the old folder is kept under another name",
        ],
    )


def _consent_hints(refused: Sequence[FieldDifference]) -> Iterator[str]:
    consents = list(dict.fromkeys(difference.consent for difference in refused))
    if None not in consents:
        yield "to go on all the same: " + " ".join(f"--allow {key}" for key in consents)
    if any(difference.key == "train.global_batch_size" for difference in refused):
        yield "with train.max_steps the end would move: give train.num_train_epochs instead"


def _data_hints(refused: Sequence[FieldDifference]) -> Iterator[str]:
    template = next((difference for difference in refused if difference.key == TEMPLATE), None)
    if template is not None and template.before is None:
        yield (
            "a run that was begun before there was data.template had nothing between prompt and response: "
            "data.template=none goes on with it"
        )
    elif template is not None:
        yield f"to go on with what the run has learned from: data.template={shlex.quote(template.before)}"
    elif any(difference.key == "data" for difference in refused):
        yield "data.path no longer gives the examples that the run has learned from: restore the data"
