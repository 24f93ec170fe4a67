"""Run files in which anything may stand: every command that reads them ends with one of its exit codes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from written_runs import BEGAN_S, WrittenRun

from trainwright.cli import app
from trainwright.errors import ExitCode, UserError
from trainwright.launch.resume import choose_start, is_finished
from trainwright.launch.slurm import submitted_run
from trainwright.launch.slurm.submission import Submitted
from trainwright.runs.checkpoints import commit, open_staging, read_manifest, seal_file
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import append
from trainwright.runs.writing import write_json_atomic
from trainwright.watch.alerts.active_alerts import Alert

MUTATIONS = 160
JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    10**400,
    2**63,
    1e308,
    "",
    "x",
    "\x00\x1b[31m",
    [],
    [[]],
    [None],
    {},
    {"a": {"b": [1]}},
]
CONTRACT: dict[str, dict[str, Any]] = {"geometry": {}, "batch": {}, "schedule": {"train.max_steps": None}, "fixed": {}}
CODES = {None, 0, 1, *ExitCode}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A failed run with every file that a run leaves, written by the project's own writers."""
    run = WrittenRun.whole(tmp_path_factory.mktemp("whole"))
    folder = run.folder
    alert = Alert(
        time_s=BEGAN_S + 20,
        state="fired",
        rule="gpu_idle",
        subject="GPU 0",
        severity="warning",
        what="GPU 0 is idle",
        advice="look at the data",
        figures={"utilization_pct": 3.0},
        threshold={"at_least": 50.0},
        since_s=BEGAN_S,
        node="node-1",
        attempt=1,
    )
    append(folder.alerts_of(0), alert.to_json())
    failed = {"event": "failed", "time_s": BEGAN_S + 100, "attempt": 1, "rank": 0, "exit_code": 1}
    append(folder.events_jsonl, {"event": "balanced", "step": 3, "reason": "rank 1 is slower"})
    append(folder.events_jsonl, failed | {"text": "Traceback (most recent call last):\nValueError: x"})
    folder.ranks_dir.mkdir()
    for rank in range(2):
        said = {"rank": rank, "time_s": BEGAN_S + 100, "attempt": 1, "node": "node-1", "pid": 1, "step": 100}
        said |= {"steps_total": 100, "total_steps": 100, "section": "data", "section_since_s": BEGAN_S}
        write_json_atomic(folder.rank_json(rank), said | {"sections_s_total": {"data": 1.0, "forward": 2.0}})
    found = {"config_name": "x", "method": "lora", "training_args": {"lr": 1e-5, "batch": 4}, "found": {}}
    write_json_atomic(folder.training_config_json, found)
    (folder.attempt_dir(1) / "rank_0.log").write_text("step 1\nTraceback (most recent call last):\nValueError: x\n")
    save(folder, 10)
    folder.launcher_dir.mkdir(exist_ok=True)
    Submitted(job_ids=("123",), submitted_at="2026-11-22T10:00:00").write(folder)
    folder.final_model_dir.mkdir()
    write_json_atomic(folder.final_model_dir / "trainwright.json", {"contract": CONTRACT})
    return folder.path


def save(folder: RunFolder, step: int, **nonsense: Any) -> None:
    """Commit a checkpoint; `nonsense` then takes the place of what its manifest says, and is sealed like the rest."""
    weights = open_staging(folder, step, 1) / "model.safetensors"
    weights.write_bytes(b"w" * 100)
    position = {"step": step, "epoch": 0, "epoch_samples": 8 * step, "samples_seen": 8 * step}
    path = commit(folder, step, 1, {weights.name: seal_file(weights)}, contract=CONTRACT, state={"position": position})
    if nonsense:
        sealed = dataclasses.replace(read_manifest(path), **nonsense)
        (path / "manifest.json").write_bytes(sealed.to_bytes())


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where something stands in a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*place, key)
        yield from places(item, (*place, key))


def changed(document: Any, draw: random.Random) -> bytes:
    """Return a document with a value that is another, or missing; or another document altogether."""
    kind = draw.choice(["value"] * 6 + ["missing", "nested", "other"])
    where = list(places(document))
    if kind == "nested":
        return b'{"a":' * 20_000 + b"1" + b"}" * 20_000
    if kind == "other" or not where:
        return json.dumps(draw.choice(JUNK)).encode()
    place, made = draw.choice(where), copy.deepcopy(document)
    inside = made
    for key in place[:-1]:
        inside = inside[key]
    if kind == "missing":
        del inside[place[-1]]
    else:
        inside[place[-1]] = draw.choice(JUNK)
    return json.dumps(made).encode()


def damage(path: Path, draw: random.Random) -> None:
    """Change a file of records or a document in one place: a value, a cut, bytes that are no text."""
    raw, kind = path.read_bytes(), draw.random()
    if kind < 0.1:
        path.write_bytes(raw[: draw.randrange(len(raw))])
    elif kind < 0.2:
        at = draw.randrange(len(raw))
        path.write_bytes(raw[:at] + draw.randbytes(40) + raw[at:])
    elif path.suffix == ".jsonl":
        lines = raw.splitlines()
        number = draw.choice([draw.randrange(len(lines)), len(lines) - 1])
        lines[number] = changed(json.loads(lines[number]), draw)
        path.write_bytes(b"\n".join(lines) + b"\n")
    else:
        path.write_bytes(changed(json.loads(raw), draw))


def ended(*arguments: str) -> object:
    """Return the exit code of a command, run in this process; UserErrors have theirs."""
    silent = io.StringIO()
    try:
        with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
            app(args=list(arguments), prog_name="trainwright")
    except SystemExit as end:
        return end.code
    except UserError as error:
        assert error.message
        return error.exit_code
    return 0


@pytest.mark.parametrize("part", range(4))
def test_harm_15_damaged_run_files_end_no_command_with_a_traceback(
    part: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """watch, report, doctor, runs, status, and a resume: on runs with one damage each, drawn from fixed seeds."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(submitted_run, "find_job", lambda job_id, **_: None)  # no Slurm here: it knows the job no more
    files = sorted(p for p in whole.rglob("*.json*") if p.is_file() and "latest" not in p.parts)
    assert len(files) >= 14
    for seed in range(part, MUTATIONS, 4):
        draw = random.Random(seed)
        run = Path(shutil.copytree(whole, tmp_path / f"{seed}", symlinks=True))
        damaged = run / draw.choice(files).relative_to(whole)
        damage(damaged, draw)
        told = f"seed {seed}: {damaged.relative_to(run)}"
        for command in (
            ("watch", str(run), "--once"),
            ("watch", str(run), "--json"),
            ("report", str(run), "--json", "--out", str(tmp_path / "page.html")),
            ("doctor", str(run), "--json"),
            ("runs", "--rebuild", str(run)),
            ("status", str(run)),
        ):
            try:
                assert ended(*command) in CODES
            except Exception as error:
                raise AssertionError(f"{told}: {command[0]} raised {error!r}") from error
        try:
            is_finished(RunFolder(run), CONTRACT, ())
            choose_start(RunFolder(run), CONTRACT, resume=None, allowed=())
        except UserError:
            pass
        except Exception as error:
            raise AssertionError(f"{told}: resume raised {error!r}") from error
        shutil.rmtree(run)


def test_harm_15_what_cannot_be_read_is_counted(whole: Path, tmp_path: Path) -> None:
    """Left out, and said: in the report by file, in watch as a note."""
    run = Path(shutil.copytree(whole, tmp_path / "run", symlinks=True))
    with (run / "system.jsonl").open("ab") as file:
        file.write(b'{"time_s": "soon", "host": {}}\n[1]\nnot a record\n')
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind":"train","step":null}\n')
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
        app(args=["report", str(run), "--json"], prog_name="trainwright")
    missing = json.loads(told.getvalue())["runs"][0]["missing"]
    assert "system.jsonl: 2 records cannot be read" in missing
    assert "metrics.jsonl: 1 records cannot be read" in missing
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
        app(args=["watch", str(run), "--once"], prog_name="trainwright")
    assert "note: 1 samples or alerts cannot be read" in told.getvalue()


@pytest.mark.parametrize("time_s", [2**63, -(2**40), 1e200])
def test_harm_15_a_time_that_no_calendar_has_is_not_available(time_s: float, whole: Path, tmp_path: Path) -> None:
    """In the events, the samples and the alerts of a run, on the page and in the terminal."""
    run = Path(shutil.copytree(whole, tmp_path / "run", symlinks=True))
    for name in ("events.jsonl", "system.jsonl", "alerts.jsonl"):
        lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
        changed = [line | {key: time_s for key in ("time_s", "since_s") if key in line} for line in lines]
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in changed))
    for command in (("report", str(run)), ("watch", str(run), "--once"), ("runs", "--rebuild", str(run))):
        assert ended(*command) in CODES


NONSENSE: dict[str, dict[str, Any]] = {
    "no position": {"state": {}},
    "a position of texts": {"state": {"position": {"step": "x", "epoch": [], "samples_seen": None}}},
    "a negative position": {
        "state": {"position": {"step": -1, "epoch": 0, "epoch_samples": 0, "samples_seen": 0}},
    },
    "a contract of texts": {"contract": {"fixed": "x"}},
    "no file": {"files": {}},
}


@pytest.mark.parametrize("case", NONSENSE)
def test_harm_15_a_sealed_manifest_of_nonsense_gives_way_to_the_checkpoint_before(
    case: str, whole: Path, tmp_path: Path
) -> None:
    """Its own sha256 fits: the one before it is taken, and this one named."""
    folder = RunFolder(shutil.copytree(whole, tmp_path / "run", symlinks=True))
    save(folder, 20, **NONSENSE[case])
    start = choose_start(folder, CONTRACT, resume=None, allowed=())
    assert start.step == 10
    assert start.lines[0].startswith("Skipped checkpoint-20: manifest.json ")
    with pytest.raises(UserError, match=r"cannot be resumed from: manifest\.json"):
        choose_start(folder, CONTRACT, resume=str(folder.checkpoint_dir(20)), allowed=())
