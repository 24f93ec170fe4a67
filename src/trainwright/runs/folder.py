"""The run folder: the one owner of every path in it, of the run's identity and of the fence between attempts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainwright.errors import ExitCode, UserError
from trainwright.runs.manifest import RUN_ID, CorruptCheckpoint, read_manifest
from trainwright.runs.trash import TRASH_PREFIX, remove, set_aside
from trainwright.runs.writing import TEMPORARY_PREFIX, read_json, sync_dir, write_json_atomic, write_json_once

# Nineteen digits and more cannot be a step; they only cost time.
_CHECKPOINT = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})", re.ASCII)
_STAGING = re.compile(r"\.staging-[a-z0-9-]+-attempt-([0-9]{1,18})", re.ASCII)
_ATTEMPT = re.compile(r"attempt_([0-9]{1,18})", re.ASCII)


class RunFolder:
    """The folder `<output_dir>/<name>` of one run; UserError if the path has `..` or control characters in it."""

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        if not all(character.isprintable() for character in str(path)):
            raise UserError(f"run folder {str(path)!r} has control characters in its name")
        if ".." in path.parts:
            raise UserError(f"run folder {path} has `..` in it", hints=[f"give it as {path.resolve()}"])
        self.path = path.absolute()

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def resolved_json(self) -> Path:
        return self.path / "resolved.json"

    @property
    def plan_json(self) -> Path:
        return self.path / "plan.json"

    @property
    def prepared_json(self) -> Path:
        return self.path / "prepared.json"

    @property
    def training_config_json(self) -> Path:
        return self.path / "training_config.json"

    @property
    def tokenizer_dir(self) -> Path:
        return self.path / "tokenizer"

    @property
    def launcher_dir(self) -> Path:
        return self.path / "launcher"

    @property
    def deepspeed_json(self) -> Path:
        return self.launcher_dir / "deepspeed.json"

    @property
    def job_json(self) -> Path:
        return self.launcher_dir / "job.json"

    @property
    def job_sbatch(self) -> Path:
        return self.launcher_dir / "job.sbatch"

    @property
    def submitted_json(self) -> Path:
        return self.launcher_dir / "submitted.json"

    @property
    def lives_jsonl(self) -> Path:
        """Each start of a job of the last submission, with what was saved before it."""
        return self.launcher_dir / "lives.jsonl"

    @property
    def submit_lock(self) -> Path:
        """Held while the run's jobs are looked for, submitted and recorded; not the run's, which its job takes."""
        return self.launcher_dir / "submit.lock"

    @property
    def first_node_json(self) -> Path:
        """What node 0 tells the others where each node is started by hand."""
        return self.launcher_dir / "first_node.json"

    @property
    def logs_dir(self) -> Path:
        return self.path / "logs"

    @property
    def latest_logs(self) -> Path:
        return self.logs_dir / "latest"

    @property
    def events_jsonl(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics_jsonl(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def system_jsonl(self) -> Path:
        return self.path / "system.jsonl"

    @property
    def report_html(self) -> Path:
        return self.path / "report.html"

    @property
    def ranks_dir(self) -> Path:
        return self.path / "ranks"

    @property
    def final_model_dir(self) -> Path:
        return self.path / "final_model"

    @property
    def output_dir(self) -> Path:
        """What a user's own script writes, its checkpoints among it; nothing of ours lies there."""
        return self.path / "output"

    @property
    def finished_json(self) -> Path:
        """Left by the end of a user's own script; the built-in trainer leaves final_model."""
        return self.path / "finished.json"

    @property
    def lock_file(self) -> Path:
        return self.path / "run.lock"

    @property
    def fence_json(self) -> Path:
        return self.path / "fence.json"

    def attempt_dir(self, attempt: int) -> Path:
        """Return the log folder of one attempt."""
        return self.logs_dir / f"attempt_{attempt}"

    def rank_log(self, attempt: int, rank: int) -> Path:
        """Return the log file of one rank in one attempt."""
        return self.attempt_dir(attempt) / f"rank_{rank}.log"

    def rank_json(self, rank: int) -> Path:
        """Return the file in which a rank says where it is."""
        return self.ranks_dir / f"rank_{rank}.json"

    def system_of(self, node: int) -> Path:
        """Return the samples of one node, whose sampler is their only writer."""
        return self.system_jsonl if node == 0 else self.path / f"system-{node}.jsonl"

    def alerts_of(self, node: int) -> Path:
        """Return the alerts that the sampler of one node gave."""
        return self.path / ("alerts.jsonl" if node == 0 else f"alerts-{node}.jsonl")

    def stack_file(self, attempt: int, rank: int) -> Path:
        """Return where a rank writes the stacks of its threads when it gets SIGUSR1."""
        return self.attempt_dir(attempt) / f"stack_rank_{rank}.txt"

    def flight_record(self, attempt: int, rank: int) -> Path:
        """Return where a rank writes which collectives it took part in, once `dump_request` is there."""
        return self.attempt_dir(attempt) / f"fr_rank_{rank}.json"

    def process_json(self, attempt: int, rank: int) -> Path:
        """Return what the kernel says of a rank's process and its children, as read on the rank's own machine."""
        return self.attempt_dir(attempt) / f"process_rank_{rank}.json"

    def dump_request(self, attempt: int) -> Path:
        """Return the file that asks the ranks of an attempt where they stand; each time it is written anew."""
        return self.attempt_dir(attempt) / "dump_request.json"

    def hang_json(self, attempt: int) -> Path:
        """Return what was found when an attempt stood still."""
        return self.attempt_dir(attempt) / "hang.json"

    def script_json(self, attempt: int) -> Path:
        """Return where the command of a user's own script stands, as one attempt runs it."""
        return self.attempt_dir(attempt) / "script.json"

    def checkpoint_dir(self, step: int) -> Path:
        """Return where the committed checkpoint of a step lies."""
        return self.path / f"checkpoint-{step}"

    def staging_dir(self, step: int, attempt: int) -> Path:
        """Return where an attempt puts together the checkpoint of a step."""
        return self.path / f".staging-checkpoint-{step}-attempt-{attempt}"

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Return (step, path) of everything that bears a checkpoint's name, valid or not, largest step first."""
        named = [(int(match[1]), self.path / match[0]) for match in self._names(self.path, _CHECKPOINT)]
        return sorted(named, reverse=True)

    def create(self) -> None:
        """Make the folder (0700) and its run id if they are not there; UserError if it is a link or cannot be made."""
        try:
            _make_own_dir(self.path)
            if not self.run_json.exists():
                write_json_once(self.run_json, {"run_id": os.urandom(16).hex()})
                sync_dir(self.path.parent)
        except OSError as error:
            message = f"the run folder {self.path} cannot be made: {error.strerror}"
            raise UserError(
                message, hints=["set output_dir to a folder you may write to"], exit_code=ExitCode.STORAGE
            ) from error

    @property
    def run_id(self) -> str:
        """The run's identity, which every checkpoint of it carries; UserError if run.json is missing or damaged."""
        try:
            run_id = _field(read_json(self.run_json), "run_id")
        except FileNotFoundError as error:
            message = f"{self.path} is not a run folder: it has no run.json"
            raise UserError(message, exit_code=ExitCode.MISSING) from error
        if not isinstance(run_id, str) or not RUN_ID.fullmatch(run_id):
            raise UserError(f"{self.run_json} has no usable run_id", hints=["any manifest.json of the run names it"])
        return run_id

    def start_attempt(self) -> int:
        """Return the number of a new attempt and shut out all older ones; call it holding the run lock.

        The fence moves first and the older attempts' staging folders lose their names second: a former attempt that is
        still writing either sees the fence or finds nothing to rename, so it can commit nothing from here on.
        """
        _make_own_dir(self.logs_dir)
        attempt = self._claim_attempt()
        write_json_atomic(self.fence_json, {"attempt": attempt})
        latest = self.path / f"{TEMPORARY_PREFIX}latest"
        latest.unlink(missing_ok=True)
        latest.symlink_to(self.attempt_dir(attempt).name)
        latest.replace(self.latest_logs)
        self.sweep()
        for temporary in self.path.glob(f"{TEMPORARY_PREFIX}*"):
            remove(temporary)
        return attempt

    @property
    def attempt(self) -> int:
        """Number of the latest attempt, 0 before the first."""
        return self._fence()

    def holds_fence(self, attempt: int) -> bool:
        """Say whether no later attempt has started."""
        return self._fence() == attempt

    def require_fence(self, attempt: int) -> None:
        """Raise UserError if another attempt has taken over the run."""
        fence = self._fence()
        if fence != attempt:
            raise UserError(
                f"another attempt ({fence}) took over {self.path}; attempt {attempt} writes nothing more",
                hints=[f"follow the newer attempt in {self.latest_logs}"],
                exit_code=ExitCode.FAILED,
            )

    def sweep(self, *, ended: int | None = None) -> list[str]:
        """Remove the trash and the staging folders of former attempts, and return what was removed.

        `ended` is the latest attempt once all its processes are gone: its staging folders go too.
        """
        fence = self._fence()
        for match in list(self._names(self.path, _STAGING)):
            if int(match[1]) != fence or fence == ended:
                try:
                    set_aside(self.path / match[0])
                except FileNotFoundError:
                    continue  # its owner committed it between the listing and now
        return sorted(trash.name for trash in self.path.glob(f"{TRASH_PREFIX}*") if remove(trash))

    def _claim_attempt(self) -> int:
        attempt = max(self._known_attempts()) + 1
        while True:
            try:
                self.attempt_dir(attempt).mkdir(mode=0o700)
            except FileExistsError:
                attempt += 1  # another start claimed the number in this moment
            else:
                return attempt

    def _known_attempts(self) -> Iterator[int]:
        """Yield every attempt number in sight: checkpoints are ordered by it, so it may never go back."""
        yield self._fence()
        for match in self._names(self.logs_dir, _ATTEMPT):
            yield int(match[1])
        run_id = self.run_id
        for _, path in self.checkpoints():
            try:
                manifest = read_manifest(path)
            except CorruptCheckpoint:
                continue
            if manifest.run_id == run_id:
                yield manifest.attempt

    def _fence(self) -> int:
        try:
            attempt = _field(read_json(self.fence_json), "attempt")
        except (FileNotFoundError, UserError):
            return 0
        return attempt if type(attempt) is int else 0

    @staticmethod
    def _names(folder: Path, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
        if folder.is_dir():
            for entry in folder.iterdir():
                if match := pattern.fullmatch(entry.name):
                    yield match


def _field(content: Any, key: str) -> Any:
    return content.get(key) if isinstance(content, dict) else None


def _make_own_dir(path: Path) -> None:
    if path.is_symlink():
        raise UserError(
            f"{path} is a symbolic link, so a run could be led to write somewhere else",
            hints=[f"name the folder itself: {path.resolve()}"],
        )
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
