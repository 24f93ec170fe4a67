"""A rank that torchrun has started: `torchrun ... -m trainwright.train.under_torchrun DIR`.

DIR is what `trainwright plan --write` wrote. torchrun knows of no run folder, so the first rank opens the attempt, in
a process of its own; the others learn its number through torchrun's store, which all of them reach, on any machine.
Where TRAINWRIGHT_ATTEMPT is set, the launcher has opened that attempt, and DIR is the run folder itself.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from trainwright.errors import ExitCode, UserError
from trainwright.job.schema import Job
from trainwright.runs.folder import RunFolder
from trainwright.runs.lock import RunLock
from trainwright.runs.writing import read_json, write_json_atomic
from trainwright.train.__main__ import leave_with
from trainwright.train.__main__ import main as run_this_rank

PREPARING_TIMEOUT = datetime.timedelta(days=1)
"""How long the others wait while the first rank prepares the data; should it fail, torchrun ends them at once."""


def main() -> int:
    """Run this rank of the next attempt; the first rank holds the run lock as long."""
    if "TRAINWRIGHT_ATTEMPT" in os.environ:
        return _run_in_open_attempt(RunFolder(sys.argv[1]), int(os.environ["TRAINWRIGHT_ATTEMPT"]))
    planned = Path(sys.argv[1])
    job = Job.model_validate(read_json(planned / "resolved.json"))
    folder = RunFolder(Path(job.output_dir) / job.name)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=PREPARING_TIMEOUT)
    key = f"trainwright/attempt/{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    with ExitStack() as held:
        if os.environ["RANK"] == "0":
            folder.create()
            held.enter_context(RunLock(folder))
            begun = subprocess.run(
                [sys.executable, "-m", "trainwright.launch.prepare_run", str(planned)], stdout=subprocess.PIPE
            )
            if begun.returncode:
                return begun.returncode
            attempt = json.loads(begun.stdout)["attempt"]
            if attempt is not None:
                _say_where_to_meet(folder, attempt)
            store.set(key, json.dumps(attempt))
        attempt = json.loads(store.get(key))
        if attempt is None:
            return ExitCode.DONE
        os.environ["TRAINWRIGHT_ATTEMPT"] = str(attempt)
        sys.argv[1] = str(folder.path)
        return run_this_rank()


def _run_in_open_attempt(folder: RunFolder, attempt: int) -> int:
    """Run this rank with its output in its own log.

    A clean stop is a good end to torchrun, which would hurry the other ranks if one returned anything else; the
    launcher reads of it in the run's events.
    """
    rank = int(os.environ["RANK"])
    with folder.rank_log(attempt, rank).open("ab") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    if rank == 0:
        _say_where_to_meet(folder, attempt)
    code = run_this_rank()
    return ExitCode.DONE if code == ExitCode.STOPPED else code


def _say_where_to_meet(folder: RunFolder, attempt: int) -> None:
    meeting = {"address": os.environ["MASTER_ADDR"], "port": int(os.environ["MASTER_PORT"])}
    write_json_atomic(folder.attempt_dir(attempt) / "meeting.json", meeting)


if __name__ == "__main__":
    try:
        leave_with(main)
    except UserError as error:
        print(error.render(), file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
