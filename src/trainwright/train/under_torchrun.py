"""A rank that torchrun has started: `torchrun ... -m trainwright.train.under_torchrun DIR`.

DIR is what `trainwright plan --write` wrote. torchrun knows of no run folder, so the first rank opens the attempt, in
a process of its own; the others learn its number through torchrun's store, which all of them reach, on any machine.
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
from trainwright.train.__main__ import main as run_this_rank

PREPARING_TIMEOUT = datetime.timedelta(days=1)
"""How long the others wait while the first rank prepares the data; should it fail, torchrun ends them at once."""


def main() -> int:
    """Run this rank of the next attempt; the first rank holds the run lock as long."""
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
                [sys.executable, "-m", "trainwright.launch.beginning", str(planned)], stdout=subprocess.PIPE
            )
            if begun.returncode:
                return begun.returncode
            attempt = json.loads(begun.stdout)["attempt"]
            if attempt is not None:
                meeting = {"address": address, "port": port}
                write_json_atomic(folder.attempt_dir(attempt) / "meeting.json", meeting)
            store.set(key, json.dumps(attempt))
        attempt = json.loads(store.get(key))
        if attempt is None:
            return ExitCode.DONE
        os.environ["TRAINWRIGHT_ATTEMPT"] = str(attempt)
        sys.argv[1] = str(folder.path)
        return run_this_rank()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(error.render(), file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
