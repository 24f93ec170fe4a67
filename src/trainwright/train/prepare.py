"""`python -m trainwright.train.prepare RUN_DIR`: tokenizer and token caches, once, before any process group exists.

The base model's files are hashed meanwhile, and those of the hub fetched first where they are not here.

Nothing is done twice: a prepared.json made from the same data, tokenizer and settings stands; else a cache that another
run made from the same is taken. transformers is loaded only when prepared.json does not stand, torch only for a user's
own task.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from trainwright.errors import ExitCode, UserError
from trainwright.framework_imports import left_out
from trainwright.job.schema import BUILT_IN_TASKS, Job
from trainwright.runs.folder import RunFolder
from trainwright.runs.kill_domain import die_with_launcher
from trainwright.runs.storage import storage_errno
from trainwright.runs.writing import read_json, write_json_atomic
from trainwright.train.data import cache
from trainwright.train.data.data_request import data_request, sha256_of, task_file
from trainwright.train.data.tokenizer import folder_sha256
from trainwright.train.inputs import base_folder, deciding_files, read_once, token_ids
from trainwright.train.stopping import STOP_SIGNALS

SCHEMA_VERSION = 2


def prepare(run_dir: Path, *, own_process: bool = False) -> dict[str, Any]:
    """Make the run's tokenizer and token caches, write prepared.json and return what it holds.

    `own_process`: nothing else in this process will want transformers.

    Raises:
        UserError: anything about the data, the tokenizer or the task that would fail later; no row can be used.
    """
    began = time.monotonic()
    folder = RunFolder(run_dir)
    job = Job.model_validate(read_json(folder.resolved_json))
    request = data_request(job)
    standing = _standing(folder, sha256_of(request))
    base = _Base(job, standing)
    base.start()
    prepared = standing if standing is not None else _make(folder, job, request, own_process)
    base.join(timeout=1.0)
    if base.is_alive():
        _say("base model: its files are fetched where they are not here, and hashed, so that a resume can compare them")
        base.join()
    prepared = prepared | base.found()
    if prepared != standing:
        write_json_atomic(folder.prepared_json, prepared)
    if standing is not None:
        _say("\n".join([f"data: prepared before; {_totals(prepared)}", *_template_lines(prepared)]))
    else:
        _say(_summary(prepared, time.monotonic() - began))
    return prepared


class _Base(threading.Thread):
    """Finds, fetches and hashes the base's files while the data are tokenized.

    A daemon: data that cannot be used are told at once, not after the rest of a download.
    """

    def __init__(self, job: Job, standing: dict[str, Any] | None) -> None:
        super().__init__(daemon=True)
        self._job = job
        self._commit: str | None = standing["model_commit"] if standing is not None else None
        self._found: dict[str, Any] = {}
        self._error: UserError | None = None

    def run(self) -> None:
        try:
            base, commit = base_folder(self._job, self._commit)
            files = deciding_files(self._job, base, task_file(self._job.task))
            read_once(files)
            self._found = {"model_commit": commit, "files": files}
        except UserError as error:
            self._error = error

    def found(self) -> dict[str, Any]:
        """Return what prepared.json says of them, once the thread has ended; UserError if one cannot be read."""
        if self._error is not None:
            raise self._error
        return self._found


def main(arguments: list[str], *, own_process: bool = False) -> int:
    """Prepare the run folder that is the only argument, and return the exit code; errors go to stderr."""
    if len(arguments) != 1:
        _say("usage: python -m trainwright.train.prepare RUN_DIR")
        return ExitCode.USAGE
    for number in STOP_SIGNALS:
        signal.signal(number, _stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        prepare(Path(arguments[0]), own_process=own_process)
    except UserError as error:
        _say(error.render())
        return error.exit_code
    except OSError as error:
        reason = storage_errno(error)
        if reason is None:
            raise
        _say(
            UserError(
                f"preparing the data failed: {os.strerror(reason)} ({error.filename or 'token cache'})",
                hints=["free space, or set data.cache_dir to a folder with more of it"],
            ).render()
        )
        return ExitCode.STORAGE
    return ExitCode.DONE


def _settle_without_torch() -> None:
    """Have transformers believe, for as long as this process lives, that there is no torch.

    It looks once, when it is imported, and would import torch to read a tokenizer.
    """
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that models cannot be built
    with left_out("torch"):
        import transformers  # noqa: F401


def _standing(folder: RunFolder, request_sha256: str) -> dict[str, Any] | None:
    """Return what prepared.json holds if it answers this request and all that it names is still there."""
    try:
        prepared: dict[str, Any] = read_json(folder.prepared_json)
    except FileNotFoundError:
        return None
    if prepared.get("schema_version") != SCHEMA_VERSION or prepared.get("request_sha256") != request_sha256:
        return None
    if folder_sha256(folder.tokenizer_dir) != prepared["tokenizer_sha256"]:
        return None
    parts = [part for part in (prepared["train"], prepared["eval"]) if part is not None]
    return prepared if all(cache.read_meta(Path(part["cache"])) for part in parts) else None


def _make(folder: RunFolder, job: Job, request: dict[str, Any], own_process: bool) -> dict[str, Any]:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # nothing forks here, which is what the library warns of
    if own_process and job.task in BUILT_IN_TASKS:  # a user's own may need both
        _settle_without_torch()
    from trainwright.train.data.preparing import Preparation

    preparation = Preparation(job, request)
    tokenizer, note = preparation.make_tokenizer(folder.tokenizer_dir)
    paths = preparation.fill_caches(tokenizer)
    metas = {name: meta for name, path in paths.items() if (meta := cache.read_meta(path)) is not None}
    assert metas.keys() == paths.keys()
    parts = {
        name: {"cache": str(paths[name]), "samples": meta.samples, "tokens": meta.tokens, "targets": meta.targets}
        for name, meta in metas.items()
    }
    return {
        "schema_version": SCHEMA_VERSION,
        # Over the tokens themselves, not over what they were made from: a newer library that makes the same tokens
        # gives the same fingerprint, and a run goes on.
        "data_fingerprint": sha256_of({name: meta.content_sha256 for name, meta in metas.items()}),
        "request_sha256": sha256_of(request),
        "tokenizer_dir": str(folder.tokenizer_dir),
        "tokenizer_sha256": folder_sha256(folder.tokenizer_dir),
        "token_ids": token_ids(tokenizer),
        "template": None if preparation.template is None else preparation.template.to_json(),
        "train": parts["train"],
        "eval": parts.get("eval"),
        "report": {"tokenizer": note, "eval": None} | {name: meta.report for name, meta in metas.items()},
    }


def _totals(prepared: dict[str, Any]) -> str:
    parts = [(name, prepared[name]) for name in ("train", "eval") if prepared[name] is not None]
    return "; ".join(
        f"{name}: {part['samples']:,} samples, {part['tokens']:,} tokens, {part['targets']:,} of them targets"
        for name, part in parts
    )


def _summary(prepared: dict[str, Any], seconds: float) -> str:
    report = prepared["report"]
    lines = [f"data: prepared in {seconds:.1f} s; {_totals(prepared)}"]
    for name in ("train", "eval"):
        if report[name] is not None:
            lines.append(f"  {name}: {report[name]['said']}")
    lines.append(f"  columns: {', '.join(report['train']['columns'])}")
    lines += _template_lines(prepared)
    if report["tokenizer"]:
        lines.append(f"  note: {report['tokenizer']}")
    if report["train"]["example"]:
        lines.append("  the first example, what is learned in [[ ]]:")
        lines += [f"    {line}" for line in report["train"]["example"].splitlines()]
    return "\n".join(lines)


def _template_lines(prepared: dict[str, Any]) -> list[str]:
    template = prepared["template"]
    if template is None:
        return []
    around = f": {json.dumps(template['text'], ensure_ascii=False)}, then the response" if "text" in template else ""
    return [f"  data.template = {template['value']}  ({template['reason']}){around}"]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _stop(number: int, frame: FrameType | None) -> None:
    """Leave through every `finally`, which removes what is unfinished; the same command begins again."""
    _say(f"stopped by {signal.Signals(number).name} while preparing the data")
    raise SystemExit(ExitCode.STOPPED)


if __name__ == "__main__":
    die_with_launcher()
    sys.exit(main(sys.argv[1:], own_process=True))
