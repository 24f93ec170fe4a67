"""torchrun for one node, in the launcher's kill domain: `python -m trainwright.train.agent RECORD.json OPTIONS...`.

OPTIONS are those of torchrun. RECORD.json gets the exit statuses of the ranks that failed first, by rank, so that the
launcher needs not read them out of torchrun's log; a rank that a signal ended has its negative number.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from trainwright.errors import ExitCode
from trainwright.runs.kill_domain import die_with_launcher
from trainwright.runs.writing import write_json_atomic
from trainwright.train.launcher import run_torchrun


def main() -> ExitCode:
    """Run torchrun to its end; return FAILED where a rank failed."""
    die_with_launcher()
    del os.environ["TRAINWRIGHT_LAUNCHER_PID"]  # a rank's launcher is this process
    record = Path(sys.argv[1])
    try:
        run_torchrun(sys.argv[2:])
    except ChildFailedError as error:
        write_json_atomic(record, {str(rank): failure.exitcode for rank, failure in error.failures.items()})
        return ExitCode.FAILED
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
